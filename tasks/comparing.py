"""`pilotage compare`: two bundles in turn on this machine, ratios with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_suites.loader import load_profile
from eval_suites.topology_comparison import Side, TopologyComparison, compare_topologies
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import EXIT_INCONCLUSIVE, EXIT_PASS, UserError
from registry.provenance import hardware
from registry.topology import gpus_of, topology_words
from tasks.devices import exclusive
from tasks.engines.load_prompts import first_prompt, from_file, supply_of
from tasks.measured_folders import begun, default_folder, measurable, prompts_digest
from tasks.serving import ServedBundle
from tasks.turns import TURNS, Comparison, Serve, compare_bundles, prompts_of_a_turn

FEWEST_REPEATS = 2
"""One repeat has a ratio and no interval."""


@dataclass(frozen=True)
class Compared:
    """A finished comparison, the names its bundles were given, and where it lies."""

    a: str
    b: str
    load: str
    comparison: Comparison
    folder: Path
    topologies: TopologyComparison | None = None
    """Where the two are arranged in different ways."""

    @property
    def exit_status(self) -> int:
        enough = self.comparison.usable >= FEWEST_REPEATS
        return EXIT_PASS if enough else EXIT_INCONCLUSIVE

    @property
    def document(self) -> dict[str, Any]:
        """What `pilotage compare --json` prints as its last line. Times in milliseconds."""
        return {
            "a": self.a,
            "b": self.b,
            "load": self.load,
            **self.comparison.document,
            **({"topologies": self.topologies.document} if self.topologies else {}),
            "evidence": str(self.folder),
            "unit": "ms",
        }


def compare(
    a: str,
    b: str,
    load: str,
    rate: float,
    repeats: int,
    *,
    prompts: Path | None = None,
    out: Path | None = None,
    serve: Serve = ServedBundle,
) -> Compared:
    """Measure bundle A and bundle B in turn at `rate` requests/s. A stopped one goes on.

    Raises `UserError` for an unknown bundle, a wrong profile, prompt file or folder, and as
    `compare_bundles` does.
    """
    profile = load_profile(load)
    if profile.concurrencies:
        raise UserError.at(
            f"load profile {load}",
            "is a closed loop; turns are sent at a rate",
            "name a profile with `rates` or a `search`",
        )
    identity: dict[str, Any] = {
        "command": "compare",
        "prompts": prompts_digest(profile, prompts),
        "profile": digest_of(profile),
        "rate": rate,
    }
    if prompts is not None:
        from_file(prompts).require(repeats * sum(prompts_of_a_turn(profile, rate)))
    first, second = measurable(a), measurable(b)
    identity |= {"a": first.digest, "b": second.digest}
    folder = begun(out or default_folder("compare", load, identity), TURNS, identity)
    supply = supply_of(profile, prompts, first_prompt(folder), first.target.path)
    # All turns in a row: an hour of another run between two of them would not make a pair.
    with exclusive(f"compare {a} and {b}"):
        found = compare_bundles(first, second, profile, supply, folder, repeats, rate, serve=serve)
    return Compared(a, b, load, found, folder, topologies_of(a, first, b, second, found))


def topologies_of(
    a: str, first: Bundle, b: str, second: Bundle, found: Comparison
) -> TopologyComparison | None:
    """What the turns say of two arrangements; None where both have one."""
    if first.topology == second.topology:
        return None
    gpus = bool(hardware()["gpus"])
    sides = [
        Side(
            name,
            topology_words(bundle.topology),
            gpus_of(bundle.engine_args, bundle.topology) if gpus else 1,
        )
        for name, bundle in ((a, first), (b, second))
    ]
    good = [(one.steady, other.steady) for one, other in found.pairs
            if not one.void and not other.void]  # fmt: skip
    return compare_topologies(sides[0], sides[1], "GPU" if gpus else "machine", good)
