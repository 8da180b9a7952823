"""`report.json` and `report.md` of a quantized checkpoint: what a person reads before a verdict.

Nothing in them depends on the day or the machine's speed: they lie beside the weights, and the
bundle's digest covers them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tasks.engines.layer_errors import worst

WORST = 10


def write(out: Path, facts: Mapping[str, Any]) -> None:
    """Both files into `out`; see `text` for the keys of `facts`."""
    (out / "report.json").write_text(
        json.dumps(facts, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    (out / "report.md").write_text(text(facts), encoding="utf-8")


def text(facts: Mapping[str, Any]) -> str:
    """The report in Markdown.

    `facts`: `recipe`, `layers`, `linear_layers`, `ratio`, `format`, `kept`, `group_size`,
    `calibration`, `perplexity` (`before`, `after`, `ratio`, `limit`, `texts`, `tokens`),
    `layer_errors`, `layer_errors_missing` (why there are none), `changed`, `rounded`, `fallback`,
    `kv_cache`, `samples`, `comparison`; with `kept` also `errors_before`, of the run that quantized
    them too.
    """
    perplexity = facts["perplexity"]
    parts = [
        "# Quantization\n",
        _table(
            ["what", "value"],
            [
                ("quantized", f"{facts['layers']} of {facts['linear_layers']} linear layers"),
                ("format", facts["format"] or "none"),
                ("size of these layers", _ratio(facts["ratio"])),
                ("group size chosen for this model", facts["group_size"] or "the recipe's own"),
                ("kept in 16 bit for their error", _kept(facts)),
                ("KV cache", f"{facts['kv_cache']} layers" if facts["kv_cache"] else "16 bit"),
                ("calibration", _calibration(facts["calibration"])),
                ("perplexity before, after", _perplexity(perplexity)),
            ],
        ),
        *_notes(facts),
        "\n## Layers of the largest error\n",
        "Relative error of the layer's outputs on calibration inputs: ||Wx - Q(x)|| / ||Wx||.\n",
        _worst(facts["layer_errors"]) or f"Not measured: {facts['layer_errors_missing']}.\n",
        *_comparison(facts["comparison"]),
        "\n## First words\n",
        *(f"- `{sample['text']!r}`\n" for sample in facts["samples"]),
        "\n## Recipe as it was run\n",
        f"```yaml\n{yaml.safe_dump(facts['recipe'], sort_keys=False)}```\n",
    ]
    return "\n".join(parts)


def _kept(facts: Mapping[str, Any]) -> str:
    """The layers with the errors they had; some stay for a neighbour that they are merged with."""
    before = facts.get("errors_before", {})
    return ", ".join(f"{name} ({_number(before[name])})" for name in facts["kept"]) or "none"


def _calibration(counted: Mapping[str, int]) -> str:
    if not counted["rows"]:
        return "none: the recipe looks at no data"
    cut = f", {counted['cut']} cut at max_length" if counted["cut"] else ""
    return f"{counted['rows']} texts, {counted['tokens']} tokens{cut}"


def _perplexity(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not measured: no held-out texts"
    return (
        f"{found['before']:.4f}, {found['after']:.4f} (ratio {found['ratio']:.4f}, limit "
        f"{found['limit']}; {found['tokens']} tokens of {found['texts']} held-out answers)"
    )


def _notes(facts: Mapping[str, Any]) -> list[str]:
    notes = []
    if facts["fallback"]:
        notes.append(
            f"\nGPTQ could not invert the Hessian of {len(facts['fallback'])} layers and rounded "
            f"them to nearest: {', '.join(facts['fallback'])}.\n"
        )
    if facts["changed"]:
        notes.append(f"\nRescaled or pruned, not quantized: {', '.join(facts['changed'])}.\n")
    if facts["rounded"]:
        notes.append(f"\nStored in another dtype than before: {', '.join(facts['rounded'])}.\n")
    return notes


def _worst(errors: Mapping[str, float | None]) -> str:
    rows = [(name, f"{error:.4f}") for name, error in worst(errors, WORST)]
    unseen = sum(error is None for error in errors.values())
    note = f"\n{unseen} layers saw no input (experts without a token).\n" if unseen else ""
    return _table(["layer", "relative error"], rows) + note if rows else note


def _comparison(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    sources = list(found)
    rows = [
        ("perplexity", *(_number(found[one]["perplexity"]) for one in sources)),
        ("mean layer error", *(_number(found[one]["mean_error"]) for one in sources)),
        ("largest layer error", *(_number(found[one]["largest_error"]) for one in sources)),
    ]
    return [
        "\n## The same recipe, calibrated on\n",
        _table(["", *sources], rows),
        "\nMeasured on the same held-out business texts and the same layer inputs.\n",
        *(f"\nOn {one} texts: {found[one]['failed']}\n" for one in sources if found[one]["failed"]),
    ]


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _ratio(ratio: float | None) -> str:
    return "unchanged" if ratio is None else f"{ratio:.4f} of before"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"
