"""A lineage as a picture: Graphviz lays it out, the page it stands in gives it its colours.

The drawing is inline SVG without a file of its own: no prolog, no script, no address. Lines and
text are drawn in `currentColor`, so that it reads on a light and on a dark page.
"""

from __future__ import annotations

import html
import re
import textwrap
import threading
from collections.abc import Collection

from registry.lineage import EVIDENCE, Edge, Lineage, Node

WIDTH = 24
"""Characters of a line within a box."""
MOST_LINES = 7
MOST_NODES = 60
"""A picture with more boxes is no help to anybody."""

_SHAPES = {"bundle": "box3d", "prompts": "folder", "teacher_data": "folder", "alias": "cds",
           "version": "tab", "more": "plaintext"}  # fmt: skip
_SHOWN: dict[str, tuple[str, ...]] = {
    "bundle": ("engine", "num_speculative_tokens", "topology"),
    "prompts": ("made.prompts.train", "made.prompts.calibration", "made.prompts.draft",
                "made.prompts.eval"),
    "teacher_data": ("engine.served_model", "made.asked", "made.answers.accepted",
                     "sampling.temperature"),
    "model": ("source", "made.parameters"),
    "distill": ("lora.r", "epochs", "made.rows"),
    "quantize": ("recipe", "calibration.source", "calibration.samples"),
    "draft": ("made.prompts", "made.acceptance_length"),
    "draft_choice": ("made.epoch", "made.acceptance_length"),
    "accuracy": ("suite.task", "made.items_scored"),
    "latency": ("profile.hardware", "made.requests", "made.kept_rate_low"),
    "draft_proof": ("made.stays", "made.tpot_p50_ratio"),
    "serving": ("made.feasible", "machine"),
}  # fmt: skip
_MARK = "#c2410c"
"""Reads on white and on black."""

_DRAWING = threading.Lock()
"""Graphviz' library keeps its state in globals."""


def svg(lineage: Lineage, marked: Collection[str] = (), title: str = "lineage") -> str:
    """The drawing from left to right, the bundle first; nodes whose id is `marked` stand out.

    It shrinks with the page to half its size: let what it stands in scroll sideways.
    Raises whatever the drawing library raises: a caller that has other work to end catches it.
    """
    import pygraphviz

    graph = pygraphviz.AGraph(directed=True, strict=False, rankdir="LR", bgcolor="transparent",
                              nodesep="0.18", ranksep="0.45")  # fmt: skip
    graph.node_attr.update(fontname="sans-serif", fontsize="11", margin="0.12,0.07")
    graph.edge_attr.update(fontname="sans-serif", fontsize="9", arrowsize="0.6")
    ordered = lineage.ordered()
    shown = ordered if len(ordered) <= MOST_NODES else ordered[: MOST_NODES - 1]
    names = {node.id: f"n{number}" for number, node in enumerate(shown)}
    for node in shown:
        look = {"label": _label(node), "shape": _SHAPES.get(node.kind, "box")}
        if node.gone:
            look["style"] = "dashed"
        if node.id in marked:
            look |= {"color": _MARK, "penwidth": "2"}
        graph.add_node(names[node.id], **look)
    for edge in lineage.edges:
        if edge.child in names and edge.parent in names and not _told(lineage, edge):
            role = edge.role.removeprefix("evidence.")
            look = {"style": "dashed"} if edge.role != role else {}
            graph.add_edge(names[edge.child], names[edge.parent], label=_plain(role, 16),
                           **look)  # fmt: skip
    if len(shown) < len(ordered):
        graph.add_node("more", label=f"and {len(ordered) - len(shown)} more", shape="plaintext")
    with _DRAWING:
        drawn = graph.draw(format="svg", prog="dot").decode("utf-8")
    return _inline(drawn, title)


def _told(lineage: Lineage, edge: Edge) -> bool:
    """Whether a line would say again what the bundle's own lines say: what evidence measured."""
    return lineage.nodes[edge.child].kind in EVIDENCE and edge.role in ("target", "draft")


def _label(node: Node) -> str:
    """A few short lines: what it is, which digest, what matters of it."""
    facts = [
        f"{name.removeprefix('made.').replace('.', ' ').replace('_', ' ')} {node.facts[name]}"
        for name in _SHOWN.get(node.kind, ())
        if name in node.facts
    ]
    texts = [
        _plain(node.title, 2 * WIDTH),
        node.digest[:12],
        *(_plain(f, 2 * WIDTH) for f in facts),
    ]
    if node.gone:
        texts.insert(2, "no longer in the store")
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH) or [""]]
    return r"\n".join(lines[:MOST_LINES])


def _plain(text: str, longest: int) -> str:
    """A text that Graphviz takes as it is: no escapes of its language, no entities, no tags."""
    kept = _printable(text)
    cut = kept if len(kept) <= longest else f"{kept[: longest - 1]}…"
    spelled = cut.replace("\\", "\\\\").replace("&", "&amp;")
    # A label between angle brackets would be taken for HTML.
    return f" {spelled}" if spelled.startswith("<") else spelled


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _inline(drawn: str, title: str) -> str:
    """The drawing as a part of a page: the page's text colour, as wide as there is room."""
    body = drawn[drawn.index("<svg") :]
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    # Every node's own title is a name of ours that says nothing to anybody.
    body = re.sub(r"<title>[^<]*</title>\s*", "", body)
    body = re.sub(r"\s(?:xmlns:xlink|id|class)=\"[^\"]*\"", "", body)
    body = body.replace('stroke="black"', 'stroke="currentColor"')
    body = body.replace('fill="black"', 'fill="currentColor"')
    body = re.sub(r"(<text [^>]*?)(?: fill=\"[^\"]*\")?>", r'\1 fill="currentColor">', body)
    size = re.search(r'<svg width="([\d.]+)pt" height="[\d.]+pt"', body)
    width = round(float(size.group(1)) * 4 / 3) if size else 0
    head = (
        f'<svg role="img" aria-label="{html.escape(_printable(title))}" '
        f'style="width:100%;min-width:{width // 2}px;max-width:{width}px;height:auto"'
    )
    return re.sub(r'<svg width="[\d.]+pt" height="[\d.]+pt"', lambda _: head, body, count=1).strip()
