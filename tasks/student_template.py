"""Can the student's chat template show what the prompts hold? Found before the teacher is asked."""

from __future__ import annotations

import json
from pathlib import Path

from registry.artifacts import Stage
from tasks.conversations import has_conversation
from tasks.engines.subprocesses import run_job
from tasks.prompt_files import PARTS
from tasks.stages import folder_of, log_file


def check_student_template(student: Stage, prompts: Stage) -> None:
    """Raises `UserError` for a role, tools or calls that the template refuses or leaves out.

    Prompts of one user message are shown by every chat template, and nothing is loaded for them.
    """
    folder = folder_of(prompts)
    parts = [folder / f"{part}.jsonl" for part in PARTS]
    files = [file for file in parts if _has_conversations(file)]
    if not files:
        return
    job = {"model": str(folder_of(student)), "files": [str(file) for file in files]}
    run_job("tasks.engines.chat_templates", job, log=log_file(student, "template"))


def _has_conversations(file: Path) -> bool:
    """Read as it is looked at: a million prompts are not held, nor parsed where none can be one."""
    with file.open(encoding="utf-8") as lines:
        named = (line for line in lines if '"messages"' in line or '"tools"' in line)
        return any(has_conversation(json.loads(line)) for line in named)
