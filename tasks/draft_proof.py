"""Does a draft pay? The bundle with and without it, in turn on the same prompts.

    kept rate without -> every number of tokens once -> greedy answers, one request at a time
        -> kept rate with the best number -> A B A B at the SLA rate -> decision

The SLA rate is the highest one that was kept without the draft. Each step is kept in the folder as
soon as it is finished, so a proof that was killed goes on (see `tasks.turns`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_suites.draft_choice import (
    BestTokens,
    DraftDecision,
    KeptInterval,
    best_tokens,
    decide,
)
from eval_suites.load import LoadProfile
from eval_suites.turns import percentile_ratio
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import Infeasible
from registry.evidence import LatencyEvidence
from registry.whole_files import write_whole
from tasks.engines.greedy_agreement import (
    Agreement,
    Answer,
    compare,
    greedy_answers,
    read_answers,
    write_answers,
)
from tasks.engines.load_generator import Row
from tasks.engines.load_prompts import Prompts
from tasks.progress import LOG
from tasks.serving import ServedBundle
from tasks.turns import (
    Comparison,
    Serve,
    Turns,
    any_emulated,
    compare_bundles,
    prompts_of_a_turn,
)

TOKENS = (1, 2, 3, 4, 5)
"""Numbers of speculative tokens that are tried."""

REPEATS = 5

AGREEMENT_PROMPTS = 64
"""None of 64 answers in disagreement: at most 4.6 % of all disagree, at 95 % (0.05 ** (1 / 64))."""

DRAFT = "draft.json"

Search = Callable[[Bundle], LatencyEvidence]
"""The kept rate of a bundle under the profile."""


@dataclass
class DraftProof:
    """What is known about a draft so far; `draft.json` holds all of it."""

    bundle: Bundle
    production: bool = True
    """As in the load profile."""
    emulated: bool | None = None
    """Whether the bundle's own kernels were emulated in a search; None: not known."""
    kept_without: KeptInterval | None = None
    kept_with: KeptInterval | None = None
    best: BestTokens | None = None
    tries: dict[str, Any] = field(default_factory=dict)
    agreement: Agreement | None = None
    turns: Comparison | None = None
    decision: DraftDecision | None = None

    @property
    def stays(self) -> bool | None:
        return self.decision.stays if self.decision else None

    def by_the_rules(self) -> DraftDecision:
        """`eval_suites.draft_choice.decide` on what was measured."""
        return decide(
            kept_with=self.kept_with,
            kept_without=self.kept_without,
            tpot=self.turns.ratios["tpot_p50"] if self.turns else None,
            acceptance_length=self.turns.acceptance_length if self.turns else None,
            agrees=self.agreement.agrees if self.agreement else None,
            agreement=self.agreement.words if self.agreement else "greedy answers not compared",
        )

    @property
    def document(self) -> dict[str, Any]:
        """The content of `draft.json`, which `eval_suites.draft_gate.DraftEvidence` reads."""
        return {
            "bundle": self.bundle.digest,
            "stays": self.stays,
            "reason": self.decision.reason if self.decision else "",
            "num_speculative_tokens": self.best.tokens if self.best else None,
            "production": self.production,
            "emulated": self.emulated,
            "kept_rate": {"without": self.kept_without, "with": self.kept_with},
            "tokens": dataclasses.asdict(self.best) if self.best else None,
            "tries": self.tries,
            "agreement": self.agreement.model_dump(mode="json") if self.agreement else None,
            "turns": self.turns.document if self.turns else None,
        }

    def end(self, folder: Path, decision: DraftDecision) -> DraftProof:
        """Keep the decision and write everything down."""
        self.decision = decision
        LOG.info("draft of %s: %s", self.bundle.name, decision.reason)
        write_whole(folder / DRAFT, json.dumps(self.document, ensure_ascii=False, indent=1))
        return self


def prove_draft(
    bundle: Bundle,
    profile: LoadProfile,
    prompts: Prompts,
    folder: Path,
    search: Search,
    *,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 1,
    repeats: int = REPEATS,
    agreement_prompts: int = AGREEMENT_PROMPTS,
    serve: Serve = ServedBundle,
) -> DraftProof:
    """Whether the bundle's draft pays; leaves `draft.json` with all numbers in `folder`.

    `search` finds the kept rate of a bundle, with prompts of its own. Each number of tokens has
    `rounds` turns, the best one `repeats` turns against the bundle without a draft. Where answers
    disagree, speed is not measured any more. Raises as `compare_bundles` and `search` do;
    `Infeasible` only when the bundle cannot be served without its draft.
    """
    folder.mkdir(parents=True, exist_ok=True)
    proof, plain = DraftProof(bundle, profile.production), without_draft(bundle)
    found = search(plain)
    proof.kept_without, proof.emulated = found.kept_rate, found.emulated
    rate = proof.kept_without[0] if proof.kept_without else None
    if rate is None:
        why = "without its draft the bundle kept the SLA at no rate, so there is none to compare at"
        return proof.end(folder, DraftDecision(None, why))
    # Before hours of measuring that would end without a decision.
    needed = (rounds + repeats) * sum(prompts_of_a_turn(profile, rate)) + agreement_prompts
    if prompts.left is not None and prompts.left < needed:
        why = (
            f"turns at {rate:.4g} requests/s, which the bundle keeps without its draft, take "
            f"{needed} prompts, and there are {prompts.left}: name more of them, or a load "
            "profile with `scenarios` or with shorter steps"
        )
        return proof.end(folder, DraftDecision(None, why))
    turns = Turns(profile, rate, folder / "tokens", serve)
    proof.best, proof.tries = try_tokens(bundle, tokens, turns, prompts, rounds)
    if proof.best.tokens is None:
        return proof.end(folder, nothing_tried(proof.tries))
    drafted = with_tokens(bundle, proof.best.tokens)
    asked = prompts.take(agreement_prompts)
    longest = profile.sampling.max_tokens
    proof.agreement = compare(
        answers_of(plain, asked, longest, folder, serve),
        answers_of(drafted, asked, longest, folder, serve),
    )
    if proof.agreement.agrees is False:
        return proof.end(folder, proof.by_the_rules())
    found = search(drafted)
    # A draft may be quantized where its target is not.
    proof.kept_with = found.kept_rate
    proof.emulated = any_emulated([proof.emulated, found.emulated])
    proof.turns = compare_bundles(
        plain, drafted, profile, prompts, folder / "turns", repeats, rate, serve=serve
    )
    return proof.end(folder, proof.by_the_rules())


def without_draft(bundle: Bundle) -> Bundle:
    return bundle.model_copy(update={"draft": None, "num_speculative_tokens": None})


def with_tokens(bundle: Bundle, count: int) -> Bundle:
    """The bundle with another number of speculative tokens."""
    assert bundle.draft is not None, "the bundle has no draft"
    return bundle.model_copy(update={"num_speculative_tokens": count})


def try_tokens(
    bundle: Bundle, tokens: Sequence[int], turns: Turns, prompts: Prompts, rounds: int
) -> tuple[BestTokens, dict[str, Any]]:
    """Turns without the draft and with each number of tokens, on the same prompts in a round.

    A number that the engine cannot run is left out with the reason, and so are void turns. One
    round cannot tell a number's speed from the machine's mood of that minute; several can.
    """
    known: dict[str, Any] = {"off": []}
    steady: dict[int, list[list[Row]]] = {}
    for number in range(1, rounds + 1):
        asked = turns.ask(prompts, number)
        off = turns.turn(f"{number:02d}-off", without_draft(bundle), asked)
        known["off"].append(off.numbers)
        for count in tokens:
            tried, rows = known.setdefault(str(count), []), steady.setdefault(count, [])
            try:
                turn = turns.turn(f"{number:02d}-tokens-{count}", with_tokens(bundle, count), asked)
            except Infeasible as reason:
                tried.append({"infeasible": str(reason)})
                rows.append([])
                continue
            over_off = percentile_ratio([(off.steady, turn.steady)], "tpot", 50)
            tried.append({**turn.numbers, "tpot_p50_over_off": over_off.value})
            rows.append([] if turn.void else turn.steady)
    return best_tokens(steady), known


def nothing_tried(tries: Mapping[str, Any]) -> DraftDecision:
    """No number of tokens gave a time: the engine cannot run the draft, or no turn counted."""
    drafted = [one for name, turns in tries.items() if name != "off" for one in turns]
    refusals = [one["infeasible"] for one in drafted if "infeasible" in one]
    if refusals and len(refusals) == len(drafted):
        return DraftDecision(False, f"the engine cannot run it here: {refusals[0]}")
    voids = [one["void"] for one in drafted if one.get("void")]
    return DraftDecision(None, f"no number of tokens gave a time: {', '.join(voids) or 'none'}")


def answers_of(
    bundle: Bundle, rows: Sequence[Row], max_tokens: int, folder: Path, serve: Serve
) -> list[Answer]:
    """The bundle's greedy answers, one request at a time; asked once, then read from `folder`."""
    asked = digest_of({"bundle": bundle.digest, "rows": list(rows), "max_tokens": max_tokens})
    file = folder / f"greedy-{asked[:12]}.json"
    kept = read_answers(file)
    if kept is not None:
        return kept
    with serve(bundle) as served:
        server = served.server
        answers = greedy_answers(server.url, server.api_key, server.served_name, rows, max_tokens)
    write_answers(file, answers)
    return answers
