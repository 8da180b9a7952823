"""What a draft's proof is measured with: kept rates on servers of their own, and prompts.

Searches and turns share no prompt. Both searches send the same ones, each to a server that was
started for it: the two kept rates then differ by the draft alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval_suites.load import LoadProfile
from eval_suites.loader import load_profile
from recipes.loader import short_name
from recipes.schema import ProveDraft
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import UserError
from registry.evidence import SUMMARY, LatencyEvidence, read_summary
from registry.outcome import Verdict
from registry.provenance import hardware_fingerprint
from registry.topology import gpus_of
from registry.whole_files import write_whole
from tasks.devices import exclusive
from tasks.draft_proof import DRAFT, DraftProof, prove_draft
from tasks.engines.engine_watch import EngineWatch
from tasks.engines.fixed_rates import Measuring
from tasks.engines.kept_rate import KeptRateSearch
from tasks.engines.load_generator import Traffic
from tasks.engines.load_prompts import Prompts, first_prompt, read_prompts, supply_of
from tasks.engines.load_run import LoadRun
from tasks.hardware import known_price
from tasks.measured_folders import begun, default_folder, measurable, prompts_digest
from tasks.progress import LOG
from tasks.serving import ServedBundle, Watched, check_times_count

SEARCHES, TURNS = "searches", "turns"

APART = 1 << 23
"""Synthetic prompts of the searches before those of the turns; two folders are 1 << 24 apart."""

ServeBundle = Callable[[Bundle], AbstractContextManager[ServedBundle]]


# -- the command -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Proved:
    """A finished proof, the name its bundle was given, and where it lies."""

    reference: str
    load: str
    proof: DraftProof
    folder: Path

    @property
    def verdict(self) -> Verdict:
        """PASS: the draft stays. FAIL: it goes. INCONCLUSIVE: not decided.

        INFEASIBLE: the times are of an emulated kernel, under a profile of production.
        """
        if self.proof.emulated and self.proof.production:
            return Verdict.INFEASIBLE
        known = {True: Verdict.PASS, False: Verdict.FAIL, None: Verdict.INCONCLUSIVE}
        return known[self.proof.stays]

    @property
    def document(self) -> dict[str, Any]:
        """What `pilotage prove-draft --json` prints as its last line. Times in milliseconds."""
        return {
            "verdict": self.verdict.value,
            "name": self.reference,
            "load": self.load,
            "served_tokens": self.proof.bundle.num_speculative_tokens,
            **self.proof.document,
            "evidence": str(self.folder),
            "unit": "ms",
        }


def prove(
    reference: str,
    load: str,
    tokens: str,
    repeats: int,
    *,
    prompts: Path | None = None,
    out: Path | None = None,
    serve: ServeBundle = ServedBundle,
) -> Proved:
    """Whether the draft of a bundle pays under a load profile. A stopped proof goes on.

    `tokens` as in `1,2,3`. Raises `UserError` for a profile without a search, a bundle without a
    draft, wrong tokens, prompts or folder, and as `prove_draft` does.
    """
    tried = sorted(set(tokens_of(tokens)))
    profile = load_profile(load)
    if profile.search is None:
        raise UserError.at(
            f"load profile {load}",
            "has no `search`, and a draft is judged by the rate that is kept with and without it",
            "name a profile with `search` and `sla`",
        )
    asked = prompts_digest(profile, prompts)
    bundle = measurable(reference)
    if bundle.draft is None:
        raise UserError.at(reference, "has no draft", "name the bundle of a candidate with one")
    identity = {
        "command": "prove-draft",
        "bundle": bundle.digest,
        "profile": digest_of(profile),
        "prompts": asked,
    }
    folder = begun(out or default_folder("draft", load, identity), DRAFT, identity)
    proof = measure_draft(
        bundle, profile, short_name(load), prompts, folder, tried, repeats, serve=serve
    )
    return Proved(reference, load, proof, folder)


def tokens_of(text: str) -> list[int]:
    """`1,2,3` as numbers of speculative tokens, as in a release recipe. Raises `UserError`."""
    try:
        return ProveDraft.model_validate({"load": "", "tokens": text.split(",")}).tokens
    except ValidationError as error:
        why = f"is no list of numbers of speculative tokens: {error.errors()[0]['msg']}"
        raise UserError.at(f"--tokens {text!a}", why, "e.g. --tokens 1,2,3") from None


# -- the measurement -------------------------------------------------------------------------


def measure_draft(
    bundle: Bundle,
    profile: LoadProfile,
    profile_name: str,
    prompts: Path | None,
    folder: Path,
    tokens: Sequence[int],
    repeats: int,
    *,
    serve: ServeBundle = ServedBundle,
) -> DraftProof:
    """`prove_draft` in `folder`, or the rest of one that was stopped there.

    `prompts` None: the profile's synthetic ones. Raises as `prove_draft` does.
    """
    supplies = Supplies(profile, prompts, folder, bundle.target.path)
    search = ServedSearch(profile, profile_name, supplies, folder, serve)
    with exclusive(f"draft of {bundle.name}"):
        return prove_draft(
            bundle, profile, supplies.of(TURNS), folder, search,
            tokens=tokens, repeats=repeats, serve=serve,
        )  # fmt: skip


@dataclass(frozen=True)
class Supplies:
    """The prompts of the searches and those of the turns, from their beginning each time."""

    profile: LoadProfile
    prompts: Path | None
    folder: Path
    tokenizer: Path

    def of(self, part: str) -> Prompts:
        """Of a file every other prompt, which is kept in the folder. Raises `UserError`."""
        if self.prompts is None:
            first = first_prompt(self.folder) + (APART if part == TURNS else 0)
            return supply_of(self.profile, None, first, self.tokenizer)
        rows = read_prompts(self.prompts)[1 if part == TURNS else 0 :: 2]
        file = self.folder / f"prompts-{part}.jsonl"
        write_whole(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return supply_of(self.profile, file, tokenizer=self.tokenizer)


class ServedSearch:
    """The kept rate of a bundle, searched on a server of its own; a finished search is kept."""

    def __init__(
        self,
        profile: LoadProfile,
        profile_name: str,
        supplies: Supplies,
        folder: Path,
        serve: ServeBundle = ServedBundle,
    ) -> None:
        self.profile, self.profile_name, self.supplies = profile, profile_name, supplies
        self.folder, self.serve = folder, serve

    def __call__(self, bundle: Bundle) -> LatencyEvidence:
        """Raises as `KeptRateSearch` and the server do."""
        folder = self.folder / f"search-{bundle.digest[:12]}"
        if not (folder / SUMMARY).exists():
            LOG.info("searching the kept rate of %s %s", bundle.name, with_or_without(bundle))
            self._search(bundle, folder)
        evidence = read_summary(folder)
        assert isinstance(evidence, LatencyEvidence)
        return evidence

    def _search(self, bundle: Bundle, folder: Path) -> None:
        profile = self.profile
        folder.mkdir(parents=True, exist_ok=True)
        supply = self.supplies.of(SEARCHES)
        with self.serve(bundle) as served:
            generator, server = served.load_generator, served.server
            check_times_count(server, profile.production)
            traffic = Traffic.of(profile, server.url, server.served_name, bundle.target.path)
            watch = EngineWatch(traffic.url, api_key=server.api_key, pids=lambda: server.pids)
            of = Measuring(
                bundle=bundle.digest,
                profile=self.profile_name,
                hardware=hardware_fingerprint(),
                engine=f"{bundle.engine} {bundle.engine_version}",
                price_per_hour=known_price(profile, gpus_of(bundle.engine_args, bundle.topology)),
                emulated=server.emulated,
            )
            run = LoadRun(traffic, generator, watch, folder / "raw", Watched(server).check)
            KeptRateSearch(profile, run, supply, folder, of, say=LOG.info).run()


def with_or_without(bundle: Bundle) -> str:
    """For people: what of its draft a bundle is served with."""
    if bundle.draft is None:
        return "without a draft"
    return f"with its draft, k={bundle.num_speculative_tokens}"
