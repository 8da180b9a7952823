"""A teacher that notes what it is asked, and the stage as a process that can be killed.

python -m tests.unit.teacher_builders URL PROMPTS [RECIPE]   runs the stage in PILOTAGE_HOME; RECIPE
                                                             is a JSON object of changes
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.schema import TeacherRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.settings import settings
from registry.store import Store
from tasks import stages, teacher_data
from tasks.serving import RemoteTeacher
from tests.threaded_server import QuietHandler, listening

CONCURRENCY = 4


@dataclass
class Teacher:
    """Answers a prompt with itself, or with a status where `status` gives one.

    `asked` counts prompts; where a seed is sent, prompt and seed.
    """

    seconds: float = 0.0
    status: Callable[[str], int] = lambda prompt: 200
    usage: bool = True
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = body["messages"][-1]["content"]
        what = f"{prompt} {body['seed']}" if "seed" in body else prompt
        with self.lock:
            self.asked[what] += 1
        time.sleep(self.seconds)
        status = self.status(prompt)
        if status != 200:
            return status, {"error": {"message": "no"}}
        finish = "length" if prompt.endswith("7") else "stop"
        choice = {"message": {"content": f"«{what}» 答"}, "finish_reason": finish}
        usage = {"prompt_tokens": 6, "completion_tokens": 4}
        return 200, {"choices": [choice], **({"usage": usage} if self.usage else {})}


@contextmanager
def teaching(teacher: Teacher) -> Iterator[str]:
    """Its URL."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = teacher.reply(body)
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

    with listening(Handler) as url:
        yield url


def recipe_for(url: str, **changes: Any) -> TeacherRecipe:
    written = {
        "kind": "teacher",
        "description": "A teacher of the tests.",
        "url": url,
        "served_model": "m",
        "sampling": {"max_tokens": 16},
        "concurrency": CONCURRENCY,
        "request_timeout": 20.0,
        "max_truncated_share": 0.5,
    }
    return TeacherRecipe.model_validate({**written, **changes})


def made_prompts(count: int) -> Stage:
    """A stage `prompts` in the store with `count` prompts, one in ten of them calibration."""
    stage = Stage(name="prompts", label="p.jsonl", version=1, config={"count": count})

    def produce(folder: Path) -> dict[str, Any]:
        names = [f"p{number}" for number in range(count)]
        cut = count - count // 10
        for part, own in (("train", names[:cut]), ("calibration", names[cut:])):
            rows = ({"id": one, "segment": "s", "prompt": f"问 {one}"} for one in own)
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
        return {}

    Store(settings().store_dir).make(stage, produce, {})
    return stage


def run(recipe: TeacherRecipe, count: int) -> ArtifactRef:
    """The stage in this process and this home. Its key names no URL: ports change in tests."""
    stages.begin_run(1)
    stage = teacher_data.stage(recipe, made_prompts(count), {}, {"served_model": "m"})
    return teacher_data.generate_teacher_data.fn(stage, recipe, RemoteTeacher(recipe))


if __name__ == "__main__":
    changes = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    run(recipe_for(sys.argv[1], **changes), int(sys.argv[2]))
