"""What a person reads of a quantized checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.engines import quantization_report

FACTS: dict[str, Any] = {
    "recipe": {"a_stage": {"a_modifiers": {"GPTQModifier": {"scheme": "W4A16"}}}},
    "layers": 13,
    "linear_layers": 15,
    "ratio": 0.2659,
    "format": "pack-quantized",
    "group_size": 64,
    "kept": ["layers.0.v_proj"],
    "errors_before": {"layers.0.v_proj": 0.25, "layers.0.o_proj": 0.1},
    "kv_cache": 0,
    "calibration": {"rows": 96, "tokens": 6000, "cut": 3},
    "perplexity": {"before": 2.0, "after": 2.1, "ratio": 1.05, "limit": 1.5},
    "layer_errors": {"layers.0.o_proj": 0.1, "layers.1.o_proj": 0.2, "experts.7.up_proj": None},
    "layer_errors_missing": "",
    "changed": ["layers.0.norm.weight"],
    "rounded": [],
    "fallback": ["layers.1.o_proj"],
    "samples": [{"prompt": "Hi", "text": "Hello\n"}],
    "comparison": {
        "business": {"perplexity": 2.1, "mean_error": 0.15, "largest_error": 0.2},
        "foreign": {"perplexity": 2.4, "mean_error": None, "largest_error": None},
    },
}
FACTS["perplexity"] |= {"texts": 32, "tokens": 900}
for one in FACTS["comparison"].values():
    one["failed"] = None


def test_the_report_says_what_was_done_and_what_it_cost(tmp_path: Path) -> None:
    quantization_report.write(tmp_path, FACTS)
    assert json.loads((tmp_path / "report.json").read_text()) == FACTS
    lines = (tmp_path / "report.md").read_text().splitlines()
    for line in (
        "| quantized | 13 of 15 linear layers |",
        "| size of these layers | 0.2659 of before |",
        "| kept in 16 bit for their error | layers.0.v_proj (0.2500) |",
        "| calibration | 96 texts, 6000 tokens, 3 cut at max_length |",
        "| perplexity before, after | 2.0000, 2.1000 (ratio 1.0500, limit 1.5; 900 tokens of 32 "
        "held-out answers) |",
        "| layers.1.o_proj | 0.2000 |",
        "1 layers saw no input (experts without a token).",
        "| perplexity | 2.1000 | 2.4000 |",
        "| mean layer error | 0.1500 | not measured |",
        "Rescaled or pruned, not quantized: layers.0.norm.weight.",
        "- `'Hello\\n'`",
    ):
        assert line in lines, line
    assert lines.index("| layers.1.o_proj | 0.2000 |") < lines.index("| layers.0.o_proj | 0.1000 |")
    assert any("could not invert the Hessian of 1 layers" in line for line in lines)


def test_what_was_not_measured_is_said() -> None:
    nothing = {"layer_errors": {}, "layer_errors_missing": "no texts", "perplexity": None}
    more = {"comparison": None, "kept": [], "calibration": {"rows": 0, "tokens": 0, "cut": 0}}
    text = quantization_report.text({**FACTS, **nothing, **more, "ratio": None, "kv_cache": 2})
    assert "Not measured: no texts." in text
    assert "| perplexity before, after | not measured: no held-out texts |" in text
    assert "| calibration | none: the recipe looks at no data |" in text
    assert "| size of these layers | unchanged |" in text
    assert "| KV cache | 2 layers |" in text
    assert "calibrated on" not in text


def test_texts_on_which_the_recipe_fails_are_told() -> None:
    broken = {"perplexity": None, "mean_error": None, "largest_error": None, "failed": "not finite"}
    comparison = {**FACTS["comparison"], "foreign": broken}
    text = quantization_report.text({**FACTS, "comparison": comparison})
    assert "| perplexity | 2.1000 | not measured |" in text
    assert "On foreign texts: not finite" in text
