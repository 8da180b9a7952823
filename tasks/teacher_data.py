"""Stage `teacher_data`: the teacher's answers to the train and calibration prompts.

Files: train.jsonl and calibration.jsonl (answers that are learned, as conversations),
responses.jsonl (every answer with its class, finish reason, reasoning and token counts),
set_aside.jsonl (id and reason), data_card.md and data_card.json, and with a judge what it said
(judgements-*.jsonl). What each answer is stands in
`answer_quality.py`, which of several is taken in `answer_scoring.py`.

Answers are kept row by row as they come (`teacher_rows`): a killed run goes on with the rows that
have none. Prompts and answers are read a row at a time; memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import JudgePick, TeacherRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.errors import StageFailed
from registry.provenance import engine_version
from tasks.answer_judge import ask_judge, judge_scores, judgements_file
from tasks.answer_quality import Judge
from tasks.answer_scoring import scorer_of
from tasks.data_card import PAGE, DataCard
from tasks.engines.languages import Languages
from tasks.progress import LOG
from tasks.serving import Served, ServedBundle, renewed_after_fault
from tasks.stages import TASK_OPTIONS, artifact_of, make
from tasks.teacher_asking import ask_missing, asked_rows
from tasks.teacher_parts import Score, account, judged_rows, write_parts
from tasks.teacher_reuse import ASKED, keep_judgements, take_over
from tasks.teacher_rows import ANSWERS, AnswerFile, held, remove, work_folder

VERSION = 4

LINGUA = "lingua-language-detector"


def stage(
    recipe: TeacherRecipe, prompts: Stage, parents: dict[str, Stage], config: dict[str, Any]
) -> Stage:
    """`parents` hold the model's stage where it is local; `config` says what serves it."""
    return Stage(
        name="teacher_data",
        version=VERSION,
        config={
            **recipe.model_dump(
                mode="json",
                include={
                    "sampling",
                    "samples",
                    "context",
                    "max_truncated_share",
                    "keep_truncated",
                    "quality",
                    "pick",
                },
                exclude={"pick": {"concurrency", "max_total_tokens"}},
            ),
            "engine": config,
        },
        parents={"prompts": prompts, **parents},
        tools={
            **({"vllm": engine_version()} if parents else {}),
            **({"lingua": version(LINGUA)} if recipe.quality.language else {}),
        },
    )


@task(name="teacher_data", **TASK_OPTIONS)
def generate_teacher_data(stage: Stage, recipe: TeacherRecipe, served: Served) -> ArtifactRef:
    """Ask the teacher. Raises `StageFailed` when there are too many answers of a bad class."""
    prompts = artifact_of(stage.parents["prompts"])
    work = work_folder(stage, prompts.digest)

    def produce(folder: Path) -> dict[str, Any]:
        total = sum(1 for _ in asked_rows(prompts.path))
        with held(work), AnswerFile(work / ANSWERS, total, recipe.samples) as answers:
            take_over(answers, work.name)
            with renewed_after_fault(served):
                ask_missing(prompts.path, answers, total, recipe, served)
            try:
                return sort_answers(folder, prompts, answers, recipe) | {ASKED: work.name}
            except StageFailed:
                LOG.warning("the answers stay in %s; remove it to ask for them anew", work)
                raise

    ref = make(stage, produce, heavy=isinstance(served, ServedBundle))
    # Not before the store has them.
    remove(work)
    return ref


def sort_answers(
    folder: Path, prompts: ArtifactRef, answers: AnswerFile, recipe: TeacherRecipe
) -> dict[str, Any]:
    """Write the stage's files from the teacher's answers, and return what they add up to."""
    judge = judge_of(recipe)
    card = DataCard(recipe, judge.language)
    with scoring(prompts.path, answers, judge, recipe, card) as score:
        rows = judged_rows(prompts.path, answers, judge, score)
        rejected = prompts.summary.get("rejected") or {}
        try:
            summary = account(card.watch(write_parts(folder, rows)), recipe)
        except StageFailed:
            # Of a stage that failed the store has nothing, and a person has to see why.
            card.write(answers.path.parent, prompts.path, rejected)
            LOG.warning("what they are is told by %s", answers.path.with_name(PAGE))
            raise
    keep_judgements(answers, folder)
    card.write(folder, prompts.path, rejected)
    return summary


def judge_of(recipe: TeacherRecipe) -> Judge:
    """The recipe's rules; the language detector is loaded where one of them needs it."""
    rule = recipe.quality.language
    if rule is None:
        return Judge(recipe.quality, recipe.keep_truncated)
    expected = rule.expect if isinstance(rule.expect, list) else []
    return Judge(recipe.quality, recipe.keep_truncated, Languages(expected).sure)


@contextmanager
def scoring(
    prompts: Path, answers: AnswerFile, judge: Judge, recipe: TeacherRecipe, card: DataCard
) -> Iterator[Score]:
    """What compares the answers to one prompt; another model is asked for its numbers first."""
    pick = recipe.pick
    if isinstance(pick, JudgePick) and recipe.samples > 1:
        file = judgements_file(answers.path.parent, pick, judge)
        with AnswerFile(file, answers.rows, answers.samples) as judgements:
            ask_judge(prompts, answers, judgements, judge, recipe)
            card.judge_tokens = judgements.tokens
            yield judge_scores(judgements, pick)
    elif pick is None or isinstance(pick, JudgePick):
        yield lambda number, sample, answer, row: None
    else:
        by_rule = scorer_of(pick)
        yield lambda number, sample, answer, row: by_rule(answer, row)
