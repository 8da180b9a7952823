"""What a plan is made from: a model's folder, hardware files, a traffic profile, limits of time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from eval_suites import loader as suites
from eval_suites.load import LoadProfile, SlaClause
from eval_suites.schema import Policy
from eval_suites.traffic import TrafficProfile
from recipes import loader
from recipes.loader import short_name
from recipes.schema import HardwareRecipe
from registry.checkpoint_weights import config_of, gguf_error, weights_of_checkpoint
from registry.errors import Problem, UserError
from registry.json_files import json_object
from registry.machines import GIB, Machine
from registry.model_shapes import shape_of
from registry.plan_parts import Demand, Model
from registry.shape_parts import ModelShape

MOST_CONCURRENCY = 100_000
MOST_CONTEXT = 100_000_000


@dataclass(frozen=True)
class Asked:
    """A demand, and in words where its numbers come from."""

    demand: Demand
    source: str
    notes: tuple[str, ...] = ()
    extreme: Demand | None = None
    """The same traffic sized by its extremes: every peak at once."""


def model_of(reference: str, draft: Path | None) -> Model:
    """A folder, a config.json, or a bundle (MODEL@ALIAS). Raises `UserError`."""
    if "@" in reference and not Path(reference).exists():
        from tasks.bundles import bundle_named, weights_as_gated

        bundle = bundle_named(reference)
        if not all(part.path.is_dir() for part in (bundle.target, bundle.draft) if part):
            weights_as_gated(bundle, reference)
        shape, size = _shape_and_size(bundle.target.path)
        part = bundle.draft.path if bundle.draft is not None and draft is None else draft
        return Model(shape, reference, _draft(part), size)
    shape, size = _shape_and_size(Path(reference).expanduser())
    return Model(shape, reference, _draft(draft), size)


def _draft(path: Path | None) -> ModelShape | None:
    return None if path is None else _shape_and_size(path.expanduser())[0]


def _shape_and_size(path: Path) -> tuple[ModelShape, int | None]:
    """The shape, and the bytes that an engine keeps of the folder's tensors, if it has any."""
    if path.suffix == ".gguf":
        raise gguf_error(path)
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        if (path / "adapter_config.json").is_file():
            raise UserError.at(path, "is an adapter, no model", "merge it into its base first")
        what = "has no config.json" if path.is_dir() else "no such file or folder"
        raise UserError.at(
            path, what, "name a model's folder, its config.json, or a bundle as MODEL@ALIAS"
        )
    try:
        content = config_of(path) if path.is_dir() else json_object(config)
    except UserError as error:
        problem = error.problems[0]
        remedy = f"take the {Path(problem.where).name} that came with the model"
        raise UserError.at(problem.where, problem.what, remedy) from None
    shape = shape_of(content, str(config))
    if not path.is_dir():
        return shape, None
    found = weights_of_checkpoint(path)
    return shape, found.loaded_bytes if found.exact else None


def machines_of(names: Sequence[str]) -> list[Machine]:
    """Hardware files by name or path; without a name all that come with the checkout."""
    shipped = loader.shipped("hardware")
    wanted = dict.fromkeys(_full_name(name, shipped) for name in names)
    return [machine_of(name) for name in wanted or shipped]


def _full_name(name: str, shipped: Sequence[str]) -> str:
    """`A10` and `a10` mean `nvidia_a10`, where no file is called so."""
    plain = re.sub(r"[\s-]+", "_", name.strip().lower())
    return next((one for one in (name, plain, f"nvidia_{plain}") if one in shipped), name)


def machine_of(name: str) -> Machine:
    name = _full_name(name, loader.shipped("hardware"))
    recipe = loader.load(name, "hardware", HardwareRecipe)
    capability = None
    if recipe.compute_capability is not None:
        major, _, minor = recipe.compute_capability.partition(".")
        capability = (int(major), int(minor))
    rates = recipe.compute.model_dump()
    return Machine(
        name=short_name(name),
        title=recipe.accelerator or short_name(name),
        memory_bytes=math.floor(recipe.memory_gib * GIB),
        accelerators=recipe.accelerators,
        capability=capability,
        cpu_instructions=frozenset(recipe.cpu_instructions),
        bandwidth=_of(recipe.bandwidth_gb_s, 1e9),
        link=_of(recipe.link_gb_s, 1e9),
        compute={unit: rate * 1e12 for unit, rate in rates.items() if rate is not None},
        price_per_hour=recipe.price_per_hour,
        currency=recipe.currency,
    )


def _of(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


# -- the load --------------------------------------------------------------------------------


def demand_of(
    concurrency: int | None, context: int | None, traffic: Path | None, trained: int
) -> Asked:
    """From the flags, from a traffic profile, or both: a flag goes before the profile."""
    if traffic is not None:
        return _from_traffic(traffic, read_traffic(traffic), concurrency, context, trained)
    missing = [
        Problem(f"--{name}", "is missing", "give it, or a traffic profile with --traffic")
        for name, value in (("concurrency", concurrency), ("context", context))
        if value is None
    ]
    if missing or concurrency is None or context is None:
        raise UserError(missing)
    return Asked(Demand(concurrency, context, context), "--concurrency and --context")


def read_traffic(path: Path) -> TrafficProfile:
    """What `pilotage profile` wrote. Raises `UserError` with every mistake of the file."""
    content = loader.read_yaml(path)
    return loader.validate(content, "traffic", TrafficProfile, source=str(path))


def _from_traffic(
    path: Path,
    profile: TrafficProfile,
    concurrency: int | None,
    context: int | None,
    trained: int,
) -> Asked:
    """The main load range, not the extremes.

    Concurrency: the stable peak. Memory for each sequence: the longest prompt and the longest
    answer of the main range together. `max-model-len`: the longest request there was, so that it
    is answered and not refused; when many of those come at once, they wait. `max-num-seqs`: the
    peak, as far as the cache holds it.
    """
    main = profile.main_range
    notes = []
    stable = profile.stable_peak_concurrency
    if concurrency is None:
        if stable is None:
            raise UserError.at(
                f"{path}: stable_peak_concurrency",
                "is null: the log does not say when its requests ended",
                "give --concurrency",
            )
        concurrency = max(1, math.ceil(stable))
    longest = math.ceil(profile.prompt_tokens.max + profile.output_tokens.max)
    if longest > trained:
        notes.append(
            f"the longest request of the log has {longest} tokens, the model was trained for "
            f"{trained}: longer ones are refused"
        )
        longest = trained
    if context is None:
        context = min(main.prompt_tokens[1] + main.output_tokens[1], trained)
    longest = max(longest, context)
    rates = [rate for rate in profile.rate_by_hour.values() if rate is not None]
    rate = profile.peak_rate if profile.peak_rate is not None else max(rates, default=None)
    if rate is None:
        notes.append("no arrival rate: estimates leave out what other prompts cost")
    low, high = main.percents
    source = (
        f"{path}: stable peak of {stable if stable is None else round(stable, 1)} in flight, "
        f"prompts and answers up to the {high:g}th percentile "
        f"({main.share_of_requests:.0%} of the requests lie in the main range of {low:g} to "
        f"{high:g})"
    )
    peak = profile.peak_concurrency
    demand = Demand(
        peak=peak,
        concurrency=concurrency,
        context=context,
        longest=longest,
        prompt=main.prompt_tokens[1],
        output=main.output_tokens[1],
        mean_prompt=profile.prompt_tokens.mean,
        mean_output=profile.output_tokens.mean,
        rate=rate,
    )
    extreme = None if peak is None else Demand(max(peak, concurrency), longest, longest)
    return Asked(demand, source, tuple(notes), extreme)


# -- limits of time --------------------------------------------------------------------------

_GATE = re.compile(r"latency\.(ttft|tpot|itl|e2el)_p[\d.]+_ms")


def limits_of(sla: str | None) -> dict[str, float]:
    """Milliseconds by metric, of a load profile, a policy, or words: `ttft p95 500ms, tpot ...`.

    The strictest of several. An estimate knows no percentiles: it is compared with all of them.
    """
    if sla is None:
        return {}
    if re.match(r"\s*(\w+ +)?(ttft|tpot|itl|e2el) +p\d", sla, re.IGNORECASE):
        clauses = [_clause(part) for part in sla.split(",")]
        found: list[tuple[str, float]] = [(one.metric, one.limit_ms) for one in clauses]
    else:
        found = _of_suite(sla)
    if not found:
        raise UserError.at(
            f"--sla {sla}",
            "has no limit of ttft, tpot, itl or e2el",
            "name a load profile with `sla`, a policy with ceilings of latency, or write "
            "'ttft p95 500ms, tpot p95 50ms'",
        )
    limits: dict[str, float] = {}
    for metric, limit in found:
        limits[metric] = min(limit, limits.get(metric, math.inf))
    return limits


def _clause(words: str) -> SlaClause:
    try:
        return SlaClause.model_validate(words.strip())
    except ValidationError as error:
        what = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise UserError.at("--sla", what, "e.g. 'ttft p95 500ms, tpot p95 50ms'") from None


def _of_suite(name: str) -> list[tuple[str, float]]:
    root = suites.SUITES_DIR
    if "/" in name or name.endswith((".yaml", ".yml")):
        kind = loader.read_yaml(loader.find(name, "load", root)).get("kind")
    else:
        kind = "policy" if name in suites.shipped("policy") else "load"
    if kind == "policy":
        policy: Policy = suites.load_policy(name)
        matches = [(rule, _GATE.fullmatch(rule.metric)) for rule in policy.gates]
        return [
            (match[1], float(rule.margin))
            for rule, match in matches
            if match is not None and rule.kind == "ceiling"
        ]
    profile: LoadProfile = suites.load_profile(name)
    return [(clause.metric, clause.limit_ms) for clause in profile.sla]
