"""From a release recipe to a plan: every file read, every stage with its key, nothing run.

`resolve` collects the recipes and suites that a release names; `plan` turns them into stages.
Both are pure but for reading files, so a dry run shows exactly what a run would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict

from eval_suites.loader import load_accuracy, load_policy, load_profile
from eval_suites.schema import AccuracySuite, LoadProfile, Policy
from recipes import loader
from recipes.schema import (
    Candidate,
    DemoModel,
    DistillRecipe,
    DraftRecipe,
    FilePrompts,
    QuantizeRecipe,
    ReleaseRecipe,
    ServeRecipe,
    TeacherRecipe,
)
from registry.artifacts import Stage
from registry.digests import digest_of
from registry.errors import Problem, UserError
from tasks import (
    accuracy,
    distillation,
    draft_checkpoints,
    draft_stage,
    latency,
    models,
    prompts,
    quantization,
    serving,
    speculation,
    teacher_data,
    tool_calling,
)
from tasks.plan_checks import mismatches

FILE_SIZES = {"train": 1200, "calibration": 64, "draft": 200, "eval": 200, "load": 200}
"""How `--prompts FILE` is split where the recipe's own prompts do not come from a file."""


class ResolvedRelease(BaseModel):
    """A release with everything it names, overrides applied. Its digest is the release's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    release: ReleaseRecipe
    teacher: TeacherRecipe
    distill: DistillRecipe
    draft: DraftRecipe | None
    quantize: dict[str, QuantizeRecipe]
    serve: dict[str, ServeRecipe]
    accuracy: AccuracySuite
    load: LoadProfile
    draft_load: LoadProfile | None = None
    policy: Policy

    @property
    def digest(self) -> str:
        return digest_of(self)


@dataclass(frozen=True)
class CandidatePlan:
    """The stages of one bundle. `target` is the student itself where nothing is quantized.

    `draft_training` leaves a few checkpoints, `draft` is the one that the engine chose.
    """

    candidate: Candidate
    quantize: Stage | None
    target: Stage
    below: str
    draft_training: Stage | None
    draft: Stage | None
    config: dict[str, Any]
    serving: Stage
    accuracy: Stage
    accuracy_reference: Stage
    accuracy_again: Stage | None
    latency: Stage
    draft_proof: Stage | None

    @property
    def name(self) -> str:
        return self.candidate.name

    def own_stages(self) -> list[Stage]:
        """What is made and measured for it alone, and where it is served."""
        made = [self.quantize, self.draft_training, self.draft, self.serving]
        return [*(stage for stage in made if stage is not None), *self.measurements()]

    def measurements(self) -> list[Stage]:
        """What is measured on it when it is served, in this order."""
        stages = [self.accuracy, self.accuracy_again, self.latency, self.draft_proof]
        return [stage for stage in stages if stage is not None]


@dataclass(frozen=True)
class ReleasePlan:
    """All stages of a release in the order in which they run."""

    resolved: ResolvedRelease
    prompts: Stage
    teacher_model: Stage | None
    teacher_config: dict[str, Any]
    teacher_data: Stage
    teacher_accuracy: Stage
    student_base: Stage
    distill: Stage
    candidates: list[CandidatePlan]

    def stages(self) -> list[Stage]:
        ordered = [
            self.prompts,
            self.teacher_model,
            self.student_base,
            self.teacher_data,
            self.teacher_accuracy,
            self.distill,
            *(candidate.quantize for candidate in self.candidates),
            *(candidate.draft_training for candidate in self.candidates),
            *(candidate.draft for candidate in self.candidates),
        ]
        for candidate in self.candidates:
            measured = candidate.measurements()
            if serving.known_infeasible(candidate.serving):
                measured = [candidate.accuracy_reference]
            ordered += [candidate.serving, *measured]
        # Two candidates may share a quantization, or a draft.
        return list({stage.key: stage for stage in ordered if stage is not None}.values())


def resolve(
    name: str, assignments: Sequence[str] = (), prompts_file: str | None = None
) -> ResolvedRelease:
    """Read and validate the release and all that it names; every file's mistakes at once.

    An override `distill.epochs=1` reaches into the recipe that the release names as `distill`;
    `quantize.NAME.x` and `serve.NAME.x` into the named ones; anything else is the release's own.
    Raises `UserError`.
    """
    overrides = loader.parse_overrides(assignments)
    parts = ("teacher", "distill", "draft", "accuracy", "load", "policy")
    nested: dict[str, dict[str, Any]] = {part: {} for part in parts}
    named: dict[str, dict[str, dict[str, Any]]] = {"quantize": {}, "serve": {}}
    own: dict[str, Any] = {}
    for dotted, value in overrides.items():
        head, _, rest = dotted.partition(".")
        if head in nested and rest:
            nested[head][rest] = value
        elif head in named and rest.count("."):
            which, _, inner = rest.partition(".")
            named[head].setdefault(which, {})[inner] = value
        else:
            own[dotted] = value
    if prompts_file is not None:
        own = _file_prompts(name, own, prompts_file)
    release = loader.load(name, "release", ReleaseRecipe, overrides=own)
    problems: list[Problem] = []

    def read(load: Callable[[], Any]) -> Any:
        try:
            return load()
        except UserError as error:
            problems.extend(error.problems)
            return None

    teacher = read(
        lambda: loader.load(release.teacher, "teacher", TeacherRecipe, overrides=nested["teacher"])
    )
    distill = read(
        lambda: loader.load(release.distill, "distill", DistillRecipe, overrides=nested["distill"])
    )
    draft = None
    if release.draft is not None:
        draft_name = release.draft
        draft = read(
            lambda: loader.load(draft_name, "draft", DraftRecipe, overrides=nested["draft"])
        )
    quantize = {
        wanted: read(partial(_named, "quantize", wanted, QuantizeRecipe, named["quantize"]))
        for wanted in dict.fromkeys(candidate.quantize for candidate in release.candidates)
    }
    serve_names = [candidate.serve for candidate in release.candidates]
    if teacher is not None and teacher.serve is not None:
        serve_names.append(teacher.serve)
    serve = {
        wanted: read(partial(_named, "serve", wanted, ServeRecipe, named["serve"]))
        for wanted in dict.fromkeys(serve_names)
    }
    if nested["draft"] and release.draft is None:
        remedy = "leave it out, or name a draft recipe"
        problems.append(Problem("--set draft...", "the release names no draft recipe", remedy))
    suite = read(lambda: load_accuracy(release.accuracy, nested["accuracy"]))
    load = read(lambda: load_profile(release.load, nested["load"]))
    draft_load = None
    if release.prove_draft is not None:
        proof = release.prove_draft
        draft_load = read(lambda: load_profile(proof.load))
    policy = read(lambda: load_policy(release.policy, nested["policy"]))
    problems += [
        Problem(
            f"--set {head}.{unused}",
            "the release names no such recipe",
            "name one that a candidate uses",
        )
        for head, rest in named.items()
        for unused in rest
    ]
    if not problems:
        problems += distillation.mismatches(distill, teacher, suite)
        problems += mismatches(release, quantize, suite, load, policy, draft_load)
    if problems:
        raise UserError(problems)
    return ResolvedRelease(
        name=loader.short_name(name),
        release=release,
        teacher=teacher,
        distill=distill,
        draft=draft,
        quantize=quantize,
        serve=serve,
        accuracy=suite,
        load=load,
        draft_load=draft_load,
        policy=policy,
    )


def read_prompts(resolved: ResolvedRelease) -> dict[str, prompts.FileFound]:
    """What the prompts files hold; nothing for the demo's. Raises `UserError`."""
    recipe = resolved.release.prompts
    return prompts.read_files(recipe) if isinstance(recipe, FilePrompts) else {}


def prompts_stage(resolved: ResolvedRelease, files: Mapping[str, prompts.FileFound]) -> Stage:
    """The stage of the prompts, which needs no model. Raises `UserError` for what they hold."""
    release, teacher = resolved.release, resolved.teacher
    demo = teacher.model if isinstance(teacher.model, DemoModel) else None
    data = prompts.stage(
        release.prompts, release.seed, demo.pretrain_messages if demo else 0, files
    )
    rows = (row for file in files.values() for row in file.records)
    if problems := tool_calling.mismatches(rows, resolved.serve):
        raise UserError(problems)
    return data


def plan(resolved: ResolvedRelease) -> ReleasePlan:
    """The stages of a release.

    Raises `UserError` with all mistakes of the files and folders that it names, and for a missing
    serve environment.
    """
    release, teacher, suite = resolved.release, resolved.teacher, resolved.accuracy
    problems = models.given_problems(
        {"teacher": teacher.model, "student": resolved.distill.student}
    )
    files: dict[str, prompts.FileFound] = {}
    try:
        files = read_prompts(resolved)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(problems)
    data = prompts_stage(resolved, files)
    if teacher.model is not None:
        teacher_model = models.stage(teacher.model, "teacher", seed=release.seed)
        teacher_config = serving.bundle_config(resolved.serve[str(teacher.serve)], None)
        teacher_parents = {"target": teacher_model}
    else:
        teacher_model = None
        teacher_config = {"url": teacher.url, "served_model": teacher.served_model}
        teacher_parents = {}
    answers = teacher_data.stage(teacher, data, teacher_parents, teacher_config)
    base = models.stage(
        resolved.distill.student, "student", teacher=teacher_model, seed=release.seed
    )
    student = distillation.stage(
        resolved.distill, base, answers, teacher_model, teacher.context, suite
    )

    def candidate_plan(candidate: Candidate) -> CandidatePlan:
        recipe = resolved.quantize[candidate.quantize]
        quantized = (
            quantization.stage(candidate.quantize, recipe, student, answers, data)
            if recipe.recipe is not None
            else None
        )
        target = quantized or student
        wanted = resolved.draft if candidate.draft else None
        serve = resolved.serve[candidate.serve]
        config = serving.bundle_config(serve, wanted.num_speculative_tokens if wanted else None)
        training = own_draft = None
        if wanted is not None:
            training = speculation.stage(
                wanted, student, data, quantized, serving.bundle_config(serve, None)
            )
            own_draft = draft_checkpoints.stage(
                candidate.name, wanted, training, student, target, config
            )
        parents = {"target": target, **({"draft": own_draft} if own_draft else {})}
        return CandidatePlan(
            candidate=candidate,
            quantize=quantized,
            target=target,
            below=quantization.QUANTIZED if quantized else distillation.MERGED,
            draft_training=training,
            draft=own_draft,
            config=config,
            serving=serving.stage(candidate.name, parents, config),
            accuracy=accuracy.stage(candidate.name, suite, data, parents, config),
            accuracy_reference=accuracy.stage(
                candidate.name, suite, data, parents, config, engine="transformers"
            ),
            accuracy_again=accuracy.stage(
                f"{candidate.name} again", suite, data, parents, config, repeat=1
            )
            if resolved.policy.noise_floor and candidate.name == release.reference_candidate
            else None,
            latency=latency.stage(candidate.name, resolved.load, data, parents, config),
            draft_proof=draft_stage.stage(
                candidate.name, release.prove_draft, resolved.draft_load, data, parents, config
            )
            if own_draft and release.prove_draft and resolved.draft_load
            else None,
        )

    return ReleasePlan(
        resolved=resolved,
        prompts=data,
        teacher_model=teacher_model,
        teacher_config=teacher_config,
        teacher_data=answers,
        teacher_accuracy=accuracy.stage("teacher", suite, data, teacher_parents, teacher_config),
        student_base=base,
        distill=student,
        candidates=[candidate_plan(candidate) for candidate in release.candidates],
    )


def _named(
    kind: str, name: str, model: type[BaseModel], overrides: dict[str, dict[str, Any]]
) -> BaseModel:
    """One of several recipes of a kind; its overrides are taken out of `overrides`."""
    return loader.load(name, kind, model, overrides=overrides.pop(name, None))


def _file_prompts(name: str, own: Mapping[str, Any], prompts_file: str) -> dict[str, Any]:
    """`--prompts FILE`: the recipe's prompts from another file, or a file instead of the demo's.

    `--set prompts....` is applied afterwards, so that mapping and sizes can be given with it.
    """
    written = loader.read_yaml(loader.find(name, "release")).get("prompts")
    if isinstance(written, dict) and written.get("source") == "file":
        return {"prompts.path": prompts_file, **own}
    rest = {key: value for key, value in own.items() if not key.startswith("prompts.")}
    changes = {key: value for key, value in own.items() if key.startswith("prompts.")}
    block = {"source": "file", "path": prompts_file, "sizes": FILE_SIZES}
    return {**rest, "prompts": block, **changes}
