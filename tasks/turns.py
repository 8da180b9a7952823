"""Two bundles in turn on this machine: A B A B ..., ratios with intervals.

Every turn starts its server anew and sends the prompts of its repeat at the same rate with the same
arrivals. It is a file of the folder as soon as it is finished; called again after a kill, the
comparison goes on behind the last one. For that the prompts must come again in the same order: a
supply of their own, from its beginning.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from eval_suites.load import LoadProfile
from eval_suites.load_steps import Around, crop_of, judge_step
from eval_suites.turns import (
    LEVEL,
    METRICS,
    PERCENTS,
    TurnDrift,
    TurnRatio,
    all_ratios,
    drift_of_turns,
    percentile_of,
    ratio,
)
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import InfrastructureError, UserError
from registry.evidence import LoadPoint
from registry.provenance import hardware_fingerprint
from registry.whole_files import write_whole
from tasks.engines.load_evidence import load_point
from tasks.engines.load_generator import Batch, LoadGenerator, Row, Traffic
from tasks.engines.load_prompts import Prompts
from tasks.engines.load_run import Seen
from tasks.progress import LOG
from tasks.serving import ServedBundle

FEWEST_WARMUP = 8

TURNS = "turns.json"
ROWS = "turns.parquet"


class Server(Protocol):
    """A running server, as `VllmServer` is one."""

    @property
    def url(self) -> str: ...
    @property
    def served_name(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def start_requests(self) -> int: ...
    @property
    def emulated(self) -> bool | None: ...
    def metrics(self) -> dict[str, float]: ...


class Served(Protocol):
    """A bundle and its server, as `ServedBundle` is one."""

    @property
    def server(self) -> Server: ...
    @property
    def load_generator(self) -> LoadGenerator: ...


Serve = Callable[[Bundle], AbstractContextManager[Served]]


# -- one turn --------------------------------------------------------------------------------


def prompts_of_a_turn(profile: LoadProfile, rate: float) -> tuple[int, int]:
    """How many are sent to warm up, and as load."""
    count = max(1, round(rate * profile.seconds_per_rate))
    return max(FEWEST_WARMUP, profile.warmup_requests), count


@dataclass(frozen=True)
class Asked:
    """What all bundles of a repeat are sent."""

    warmup: Sequence[Row]
    rows: Sequence[Row]
    seed: int


class Turn(BaseModel):
    """One start of one bundle under load; `void` says why it counts for nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: str = Field(description="Digest of bundle, machine, traffic, rate and prompts.")
    name: str
    bundle: str = Field(description="Digest.")
    generator: str
    emulated: bool | None = Field(
        default=None, description="As in `LatencyEvidence`; None: not known."
    )
    void: str = ""
    point: LoadPoint
    rows: list[Row]

    @property
    def steady(self) -> list[Row]:
        """Rows after the start of the turn."""
        return self.rows[crop_of(self.rows) :]

    @property
    def numbers(self) -> dict[str, Any]:
        """Without rows; `steady_ms` is what ratios are made of. Null: none, or of failed ones."""
        times = {
            f"{metric}_p{percent:g}": percentile_of(self.steady, metric, percent)
            for metric in METRICS
            for percent in PERCENTS
        }
        known = self.model_dump(mode="json", exclude={"rows", "identity"})
        finite = {
            name: one if one is not None and math.isfinite(one) else None
            for name, one in times.items()
        }
        return known | {"steady_ms": finite}


class Turns:
    """Turns at one rate in one folder, each measured once."""

    def __init__(self, profile: LoadProfile, rate: float, folder: Path, serve: Serve) -> None:
        self.profile, self.rate, self.folder, self.serve = profile, rate, folder, serve
        (folder / "raw").mkdir(parents=True, exist_ok=True)

    def ask(self, prompts: Prompts, number: int) -> Asked:
        """Fresh prompts; a kill changes neither them nor the seed of the arrivals."""
        warmup, count = prompts_of_a_turn(self.profile, self.rate)
        return Asked(prompts.take(warmup), prompts.take(count), self.profile.seed + number)

    def turn(self, name: str, bundle: Bundle, asked: Asked) -> Turn:
        """Start the bundle, warm it up, send the load; or what an earlier call kept of it.

        Raises `Infeasible`, `InfrastructureError`; `UserError` when the folder holds this turn of
        another comparison.
        """
        identity = digest_of(
            {
                "bundle": bundle.digest,
                "hardware": hardware_fingerprint(),
                "sampling": self.profile.sampling,
                "burstiness": self.profile.burstiness,
                "request_timeout": self.profile.request_timeout,
                "cache_band": self.profile.cache_band,
                "rate": self.rate,
                "asked": dataclasses.asdict(asked),
            }
        )
        file = self.folder / f"{name}.json"
        if file.exists():
            kept = Turn.model_validate_json(file.read_bytes())
            if kept.identity != identity:
                raise UserError.at(
                    file, "is a turn of another comparison", "name another folder, or remove it"
                )
            return kept
        turn = self._measure(name, identity, bundle, asked)
        write_whole(file, turn.model_dump_json())
        tpot = percentile_of(turn.steady, "tpot", 50)
        LOG.info(
            "turn %s: %s, TPOT p50 %s ms%s",
            name,
            bundle.name,
            "unknown" if tpot is None else f"{tpot:.3g}",
            f"; void: {turn.void}" if turn.void else "",
        )
        return turn

    def _measure(self, name: str, identity: str, bundle: Bundle, asked: Asked) -> Turn:
        with self.serve(bundle) as served:
            generator, server = served.load_generator, served.server
            traffic = Traffic.of(self.profile, server.url, server.served_name, bundle.target.path)
            warmup = Batch(asked.warmup, asked.seed)
            load = Batch(asked.rows, asked.seed, self.rate)
            handed_over = server.metrics()
            woken = generator.send(traffic, warmup, self.folder / "raw" / f"{name}.warmup.json")
            if not any(row["ok"] for row in woken.rows):
                raise InfrastructureError(
                    f"{bundle.name} answered no warm-up request: {woken.rows[0]['error']}"
                )
            before = server.metrics()
            sent = generator.send(traffic, load, self.folder / "raw" / f"{name}.json")
            after = server.metrics()
        growth = {key: value - before.get(key, 0.0) for key, value in after.items()}
        around = Around(growth, client_lag_ms=sent.client_lag_ms)
        result = judge_step(self.profile, self.rate, [sent.rows], around)
        seen = Seen([sent.rows], sent.duration, growth, client_lag_ms=sent.client_lag_ms)
        answered = handed_over.get("vllm:request_success_total", 0.0)
        stale = f"the server had answered {answered:.0f} requests before this turn"
        return Turn(
            identity=identity,
            name=name,
            bundle=bundle.digest,
            generator=generator.version,
            emulated=server.emulated,
            void=stale if answered > server.start_requests else result.cause if result.void else "",
            point=load_point(self.profile, result, seen),
            rows=sent.rows,
        )


# -- A B A B ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """B over A over all repeats in which neither turn is void."""

    rate: float
    pairs: list[tuple[Turn, Turn]]
    ratios: dict[str, TurnRatio]
    drifts: dict[str, TurnDrift]
    notes: list[str]

    @property
    def usable(self) -> int:
        """Repeats in which neither turn is void."""
        return sum(not a.void and not b.void for a, b in self.pairs)

    @property
    def emulated(self) -> bool | None:
        """Whether a turn's times are of an emulated kernel; None where no turn says so."""
        return any_emulated(one.emulated for pair in self.pairs for one in pair)

    @property
    def acceptance_length(self) -> float | None:
        """Of B, the mean over its turns that are not void."""
        lengths = [b.point.acceptance_length for _, b in self.pairs if not b.void]
        known = [one for one in lengths if one is not None]
        return sum(known) / len(known) if known else None

    @property
    def document(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "usable_repeats": self.usable,
            "emulated": self.emulated,
            "turns": [turn.numbers for pair in self.pairs for turn in pair],
            "ratios": {name: dataclasses.asdict(one) for name, one in self.ratios.items()},
            "drift_of_a": {name: dataclasses.asdict(one) for name, one in self.drifts.items()},
            "acceptance_length": self.acceptance_length,
            "notes": self.notes,
        }


def compare_bundles(
    a: Bundle,
    b: Bundle,
    profile: LoadProfile,
    prompts: Prompts,
    folder: Path,
    repeats: int,
    rate: float,
    *,
    level: float = LEVEL,
    serve: Serve = ServedBundle,
) -> Comparison:
    """A B A B ...: `repeats` turns of each at `rate` requests/s, `seconds_per_rate` long.

    Every turn starts its server anew, so no prefix cache is carried over; the prompts of a repeat
    are the same for both, and new for each repeat. Raises as `Turns.turn`, and `UserError` for
    too few prompts. Leaves `turns.json`, `turns.parquet` and the turns in `folder`.
    """
    turns = Turns(profile, rate, folder, serve)
    pairs: list[tuple[Turn, Turn]] = []
    for repeat in range(1, repeats + 1):
        asked = turns.ask(prompts, repeat)
        first = turns.turn(f"{repeat:02d}-a", a, asked)
        pairs.append((first, turns.turn(f"{repeat:02d}-b", b, asked)))
    comparison = compared(rate, pairs, level)
    write_rows(folder / ROWS, [turn for pair in pairs for turn in pair])
    write_whole(folder / TURNS, json.dumps(comparison.document, ensure_ascii=False, indent=1))
    return comparison


def compared(rate: float, pairs: Sequence[tuple[Turn, Turn]], level: float) -> Comparison:
    """Ratios and drifts of finished turns. Pure."""
    good = [(a, b) for a, b in pairs if not a.void and not b.void]
    rows = [(a.steady, b.steady) for a, b in good]
    ratios = all_ratios(rows, level)
    speeds = [
        (a.point.output_tokens_per_s or 0.0, b.point.output_tokens_per_s or 0.0) for a, b in good
    ]
    ratios["output_tokens_per_s"] = ratio(speeds, level)
    drifts = {}
    for metric in ("ttft", "tpot", "e2el"):
        medians = [percentile_of(steady, metric, 50) for steady, _ in rows]
        drifts[f"{metric}_p50"] = drift_of_turns([one for one in medians if one is not None])
    notes = [f"turn {one.name} is void: {one.void}" for pair in pairs for one in pair if one.void]
    for side, turns in (("A", [a for a, _ in pairs]), ("B", [b for _, b in pairs])):
        if any_emulated(one.emulated for one in turns):
            notes.append(
                f"{side} was computed by an emulated kernel: its times are not those of its format"
            )
    for name, drift in drifts.items():
        if drift.p is not None and drift.per_turn is not None and drift.p < 1 - level:
            notes.append(
                f"{name} of A drifts by {drift.whole:+.1%} over the repeats: about "
                f"{drift.per_turn:+.1%} of every ratio is the machine's"
            )
    return Comparison(rate, list(pairs), ratios, drifts, notes)


def any_emulated(known: Iterable[bool | None]) -> bool | None:
    """True where one is; None where nobody knows."""
    said = [one for one in known if one is not None]
    return any(said) if said else None


def write_rows(path: Path, turns: Sequence[Turn]) -> None:
    """`turns.parquet`: `REQUEST_COLUMNS`, and which turn and bundle the request belongs to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**row, "turn": one.name, "bundle": one.bundle} for one in turns for row in one.rows]
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    partial.replace(path)
