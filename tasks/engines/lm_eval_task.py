"""The lm-eval task that `lm_eval_run` asks: a YAML file's, over given items.

lm-eval 0.4.13 knows one user turn per item, with examples and a description before it. An item
with a conversation of its own (system prompt, earlier turns, tools) is sent as exactly that: found
by the item's id, since two conversations may end with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.errors import Problem, UserError
from tasks.conversations import has_conversation, messages_of, tools_of

Row = dict[str, Any]


def load_task(path: Path, items: Path) -> dict[str, Any]:
    """The task's configuration with its evaluated split read from `items`.

    Other splits (few-shot examples) stay what they are, their paths taken from the YAML's folder.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        task = load_yaml(path)
    except Exception as error:
        # YAML errors, a missing include, an error inside the task's own functions.
        raise UserError.at(path, f"not a usable lm-eval task: {error}") from None
    problems = []
    if not isinstance(task.get("task"), str):
        problems.append(Problem(f"{path}: task", "one task with a name is needed, no group"))
    if task.get("output_type", "generate_until") != "generate_until":
        problems.append(
            Problem(
                f"{path}: output_type",
                f"{task['output_type']!r} needs log-probabilities of prompts",
                "use generate_until: the served bundle is asked as in production",
            )
        )
    if task.get("dataset_path") != "json":
        problems.append(
            Problem(
                f"{path}: dataset_path",
                f"is {task.get('dataset_path')!r}",
                "use json: items come from a local file, never from a hub",
            )
        )
    split = task.get("test_split") or task.get("validation_split")
    if not split:
        problems.append(Problem(f"{path}: test_split", "is missing", "name it, e.g. test"))
    if problems:
        raise UserError(problems)
    arguments = dict(task.get("dataset_kwargs") or {})
    files = arguments.get("data_files")
    others = files if isinstance(files, dict) else {}
    arguments["data_files"] = {
        name: str(path.parent / file) for name, file in others.items() if name != split
    } | {split: str(items)}
    return {**task, "dataset_kwargs": arguments}


# -- items with a conversation of their own --------------------------------------------------


def check_conversations(task: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raises `UserError` where the task puts texts of its own round such items."""
    first = next((row for row in rows if has_conversation(row)), None)
    if first is None:
        return
    # A class of its own has no place where a conversation could be put in.
    own = [name for name in ("num_fewshot", "description", "gen_prefix", "class") if task.get(name)]
    if own:
        raise UserError(
            [
                Problem(
                    f"task {task['task']}: {name}",
                    f"does not go with items that are conversations, such as {first['id']}",
                    "leave it out: put what it says into prompts.system, or into the messages",
                )
                for name in own
            ]
        )


def conversation_task(task: dict[str, Any], rows: Sequence[Row]) -> Any:
    """lm-eval's task object, whose items with a conversation are sent as that."""
    from lm_eval.api.task import ConfigurableTask

    conversations = {str(row["id"]): row for row in rows if has_conversation(row)}

    class ConversationTask(ConfigurableTask):
        """lm-eval's task, but for the turns of such an item."""

        def fewshot_context(
            self, doc: Row, *args: Any, chat_template: Callable[..., Any], **options: Any
        ) -> Any:
            row = conversations.get(str(doc.get("id")))
            if row is None:
                return super().fewshot_context(doc, *args, chat_template=chat_template, **options)
            if self.doc_to_text(doc) != row["prompt"]:
                raise UserError.at(
                    f"task {task['task']}: doc_to_text",
                    f"changes the last message of {row['id']}, which is a conversation",
                    "let it give the column `prompt` as it is, by a function",
                )
            return chat_template(messages_of(row), tools=tools_of(row))

    return ConversationTask(config=dict(task))
