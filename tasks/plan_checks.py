"""Mistakes of a release that only show when its files are seen together.

Pure, but for two files that are read: the hardware's, which the load profile names, for its price,
and the traffic profile.
"""

from __future__ import annotations

from collections.abc import Mapping

from eval_suites.draft_gate import DRAFT_PAYS
from eval_suites.policy import KEPT_RATE
from eval_suites.schema import AccuracySuite, LoadProfile, Policy
from recipes.schema import FilePrompts, QuantizeRecipe, ReleaseRecipe
from registry.errors import Problem
from tasks.engines.fixed_rates import requests_of
from tasks.hardware import known_price
from tasks.quantization import held_out_count
from tasks.release_traffic import traffic_problems


def mismatches(
    release: ReleaseRecipe,
    quantize: Mapping[str, QuantizeRecipe],
    suite: AccuracySuite,
    load: LoadProfile,
    policy: Policy,
    draft_load: LoadProfile | None = None,
) -> list[Problem]:
    """What does not fit; `draft_load` is the profile of `prove_draft`."""
    problems = _draft_mismatches(release, policy, draft_load)
    problems += _objective_mismatches(release, load)
    problems += traffic_problems(release)
    asked = release.prompts.sizes["eval"]
    if asked < suite.items:
        problems.append(
            Problem(
                f"release {release.model}: prompts.sizes.eval",
                f"is {asked}, the accuracy suite asks {suite.items} items",
                "raise it, or lower accuracy.items",
            )
        )
    if isinstance(release.prompts, FilePrompts) and release.prompts.mapping.reference is None:
        problems.append(
            Problem(
                f"release {release.model}: prompts.mapping.reference",
                "is not given, so no answer could be scored",
                "name the column with the right answer, e.g. "
                "--set prompts.mapping.reference=category",
            )
        )
    # A search ends with what it knows when the prompts are used up; synthetic ones never are.
    sent = 0 if load.search is not None or load.scenarios else requests_of(load)
    if release.prompts.sizes["load"] < sent:
        problems.append(
            Problem(
                f"release {release.model}: prompts.sizes.load",
                f"is {release.prompts.sizes['load']}, load profile {release.load!r} sends {sent} "
                "requests, each with a prompt of its own",
                "raise it, or shorten the load profile",
            )
        )
    needed = max(
        (
            recipe.calibration.samples
            for recipe in quantize.values()
            if recipe.calibration is not None and recipe.calibration.source == "business"
        ),
        default=0,
    )
    given = release.prompts.sizes["calibration"]
    kept_apart = held_out_count(given)
    if needed and given - kept_apart < needed:
        problems.append(
            Problem(
                f"release {release.model}: prompts.sizes.calibration",
                f"is {given}; {kept_apart} of them judge the quantized model, {given - kept_apart} "
                f"are left, a quantize recipe asks {needed}",
                "raise it well above, since some answers of the teacher may be set aside",
            )
        )
    reference = next(c for c in release.candidates if c.name == release.reference_candidate)
    if quantize[reference.quantize].recipe is not None or reference.draft:
        problems.append(
            Problem(
                f"release {release.model}: reference_candidate",
                f"{reference.name!r} is not the unquantized student without a draft",
                "name the candidate whose quantize recipe leaves the weights as they are",
            )
        )
    for gate in policy.gates:
        metrics = [*suite.metrics, "output_tokens"]
        if not gate.on_latency and gate.metric not in metrics:
            problems.append(
                Problem(
                    f"policy {release.policy}: gate {gate.name}",
                    f"metric {gate.metric!r} is not measured by suite {release.accuracy!r}",
                    f"one of {', '.join(metrics)}",
                )
            )
        if gate.metric == KEPT_RATE and load.search is None:
            problems.append(
                Problem(
                    f"policy {release.policy}: gate {gate.name}",
                    f"load profile {release.load!r} has no search",
                    "name a profile with `search`, or judge a percentile at one of its rates",
                )
            )
        elif gate.on_latency and gate.metric != KEPT_RATE and gate.rate not in load.rates:
            problems.append(
                Problem(
                    f"policy {release.policy}: gate {gate.name}",
                    f"rate {gate.rate} is not measured by load profile {release.load!r}",
                    f"one of {', '.join(map(str, load.rates)) or 'no rate: it is a search'}",
                )
            )
    looks = [look.items for look in policy.looks]
    if looks and suite.items not in looks:
        problems.append(
            Problem(
                f"policy {release.policy}: looks",
                f"plans {', '.join(map(str, looks))} items, suite {release.accuracy!r} asks "
                f"{suite.items}",
                "set `accuracy.items` to one of them",
            )
        )
    return problems


def _objective_mismatches(release: ReleaseRecipe, load: LoadProfile) -> list[Problem]:
    """What the objective needs and the load test will not measure: found before a night of it."""
    promotion = release.promotion
    asked = set(promotion.weights) or ({"cost"} if promotion.objective == "cheapest" else set())
    where = f"release {release.model}: promotion." + (
        "weights" if promotion.weights else "objective"
    )
    problems = []
    if load.search is None and asked & {"kept_rate", "cost"}:
        what = " and ".join(sorted(asked & {"kept_rate", "cost"}))
        problems.append(
            Problem(
                where,
                f"needs {what}, and load profile {release.load!r} has no search: at fixed rates "
                "every candidate is paid for the same load",
                "name a profile with `search`, or weigh `latency`",
            )
        )
    if load.search is not None and "latency" in asked:
        problems.append(
            Problem(
                where,
                f"weighs latency, and load profile {release.load!r} searches its rates, so no two "
                "candidates are measured at the same",
                "weigh `kept_rate`, or name a profile with fixed rates",
            )
        )
    if "cost" in asked and known_price(load) is None:
        problems.append(
            Problem(
                where,
                f"needs costs, and hardware {load.hardware!r} has no `price_per_hour`",
                f"write one into recipes/hardware/{load.hardware}.yaml, or take another objective",
            )
        )
    return problems


def _draft_mismatches(
    release: ReleaseRecipe, policy: Policy, load: LoadProfile | None
) -> list[Problem]:
    """What keeps the drafts of a release from being proved."""
    if release.prove_draft is None or load is None:
        return []
    where, problems = f"release {release.model}: prove_draft", []
    if not any(candidate.draft for candidate in release.candidates):
        problems.append(
            Problem(where, "no candidate has `draft: true`", "remove it, or add a candidate")
        )
    if load.search is None:
        problems.append(
            Problem(
                f"{where}.load",
                f"load profile {release.prove_draft.load!r} has no search, and a draft is judged "
                "by the rate that is kept with and without it",
                "name a profile with `search` and `sla`",
            )
        )
    if DRAFT_PAYS in [gate.name for gate in policy.gates]:
        problems.append(
            Problem(
                f"policy {release.policy}: gate {DRAFT_PAYS}",
                "is the name of the gate that `prove_draft` adds",
                "call it otherwise",
            )
        )
    return problems
