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


# -- the items -------------------------------------------------------------------------------


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


def task_of_items(task: dict[str, Any], rows: Sequence[Row]) -> Any:
    """lm-eval's task object over these rows, whose items with a conversation are sent as that."""
    from lm_eval.api.task import ConfigurableTask

    conversations = {str(row["id"]): row for row in rows if has_conversation(row)}
    split = task.get("test_split") or task.get("validation_split")

    class TaskOfItems(ConfigurableTask):
        """lm-eval's task, but for where its items come from and the turns of such an item."""

        def download(self, dataset_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
            arguments = dict(dataset_kwargs or {})
            files = dict(arguments["data_files"])
            del files[split]
            if files:
                super().download({**arguments, "data_files": files}, **options)
            else:
                self.dataset = {}
            self.dataset[split] = dataset_of(rows)

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

    return TaskOfItems(config=dict(task))


def dataset_of(rows: Sequence[Row]) -> Any:
    """Items as a `datasets.Dataset` whose rows are what they were. Raises `UserError` otherwise.

    Its reader of JSON lines (datasets 5.1, Arrow's) takes a column of texts that all look like
    dates for times, a prompt or the field of a reference alike.
    """
    import datasets
    import pyarrow

    documents = [document(row) for row in rows]
    names = list(dict.fromkeys(name for one in documents for name in one))
    whole = [{name: one.get(name) for name in names} for one in documents]
    try:
        made = datasets.Dataset.from_list(whole, on_mixed_types="use_json")
        odd = next((one for one, same in zip(whole, made, strict=True) if one != same), None)
        why = "comes out of a data set changed (a number with too many digits?)"
    except (pyarrow.ArrowException, OverflowError, ValueError, TypeError) as error:
        odd, why = whole[0], f"or another item's cannot be put into a data set: {error}"
    if odd is not None:
        raise UserError.at(
            f"item {odd['id']}", f"its reference {why}", "write such a value as a text"
        )
    return made


def document(row: Row) -> Row:
    """An item as the task sees it. Not its conversation and tools, which are of many shapes."""
    return {key: value for key, value in row.items() if key not in ("messages", "tools")}
