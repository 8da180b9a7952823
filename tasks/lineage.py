"""The lineage of a bundle, from this machine's store."""

from __future__ import annotations

from collections.abc import Mapping

from registry.artifacts import ArtifactRef
from registry.bundle import Bundle, Part
from registry.lineage import BUNDLE, Lineage, Named, Node, collect
from registry.settings import settings


def lineage_for(bundle: Bundle, evidence_refs: Mapping[str, ArtifactRef]) -> Lineage:
    """The bundle on top, its target and draft, what measured it (by kind), and all below.

    What the store no longer has is a node marked `gone`; nothing is raised for it.
    """
    top = Node(
        kind=BUNDLE,
        key=bundle.digest,
        digest=bundle.digest,
        label=bundle.name,
        facts={
            "engine": f"{bundle.engine} {bundle.engine_version}",
            **({"num_speculative_tokens": str(bundle.num_speculative_tokens)}
               if bundle.draft else {}),
            **({"topology": bundle.topology.words} if bundle.topology else {}),
        },
    )  # fmt: skip
    roots = {"target": _named(bundle.target)}
    if bundle.draft is not None:
        roots["draft"] = _named(bundle.draft)
    roots |= {
        f"evidence.{kind}": Named(ref.stage, ref.key, ref.digest)
        for kind, ref in evidence_refs.items()
    }
    return collect(settings().store_dir, top, roots)


def _named(part: Part) -> Named:
    return Named(part.stage, part.key, part.digest, part.below)
