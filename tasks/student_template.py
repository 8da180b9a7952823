"""Can the student's chat template show what the prompts hold? Found before the teacher is asked."""

from __future__ import annotations

from registry.artifacts import Stage
from tasks.conversations import has_conversation
from tasks.engines.subprocesses import run_job
from tasks.prompt_files import PARTS, read_jsonl
from tasks.stages import folder_of, log_file


def check_student_template(student: Stage, prompts: Stage) -> None:
    """Raises `UserError` for a role, tools or calls that the template refuses or leaves out.

    Prompts of one user message are shown by every chat template, and nothing is loaded for them.
    """
    folder = folder_of(prompts)
    files = [
        folder / f"{part}.jsonl"
        for part in PARTS
        if any(has_conversation(row) for row in read_jsonl(folder / f"{part}.jsonl"))
    ]
    if not files:
        return
    job = {"model": str(folder_of(student)), "files": [str(file) for file in files]}
    run_job("tasks.engines.chat_templates", job, log=log_file(student, "template"))
