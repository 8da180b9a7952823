"""Quantize a model with llmcompressor, and believe only what stands in the written files.

`python -m tasks.engines.compressor JOB RESULT`. JOB:

    model             folder (safetensors, tokenizer, chat template)
    out_dir           gets the quantized model, `report.md` and `report.json`
    recipe            llmcompressor recipe as a mapping
    calibration_file  JSONL of {"messages": [...]}, or null
    samples           rows of it that are used; max_length: tokens of each, the rest is cut
    held_out_file     JSONL of answers that are in no calibration file, or null: no perplexity
    compare_file      calibration texts of another kind for a second run, or null; compare_names:
                      what the two kinds are called
    mixed_precision   {"keep_worst": N} or {"max_layer_error": x}, or null
    max_size_ratio    largest allowed bytes of the quantized layers over their bytes before
    max_perplexity_ratio, threads, seed

RESULT: `recipe` as it was run, `planned` and `found` (layer names), `linear_layers`, `group_size`
(chosen for `auto`), `kept` (layers left in 16 bit), `size_before`, `size_after` (bytes of all
weights), `layers_before`, `layers_after` (bytes of the quantized layers), `ratio`, `calibration`
(`rows`, `tokens`, `cut`), `perplexity`, `mean_error`, `worst` (layer, error), `fallback`, `format`,
`compute_dtype`, `samples` (prompt, text), `quantize_seconds`, `quantize_cpu_seconds` and
`quantize_peak_bytes` of llmcompressor alone, `seconds`, `cpu_seconds` and `peak_bytes` of all.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from registry.errors import InfrastructureError, Problem, StageFailed
from tasks.engines import (
    calibration_texts,
    checkpoint_checks,
    layer_errors,
    model_files,
    oneshot_run,
    quantization_plan,
    quantization_recipe,
    quantization_report,
    text_loss,
)
from tasks.engines.model_modules import module_list
from tasks.engines.subprocesses import job_main

CHECK_PROMPTS = 2
CHECK_TOKENS = 16
HELD_OUT_LENGTH = 512
"""Tokens of a held-out text that are looked at."""
HELD_OUT_TOKENS = 2048
HELD_OUT_TEXTS = 8
"""As many texts as have these tokens together, but so many at least."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Plan, quantize, read back, judge. Raises `StageFailed` for whatever does not add up."""
    # Before torch is loaded: OpenMP threads that wait by spinning took five times as long, and four
    # times the processor time, on two cores with other work on them; waiting asleep cost nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    started = time.monotonic()
    model, out = Path(job["model"]), Path(job["out_dir"])
    model_files.check_weights(model, "quantize")
    model_files.check_side_files(model, model, "quantize")
    torch.set_num_threads(int(job["threads"]))
    out.mkdir(parents=True, exist_ok=True)
    try:
        result = _quantized(job)
    except (MemoryError, RuntimeError) as error:
        if not oneshot_run.out_of_memory(error):
            raise
        raise InfrastructureError(
            f"out of memory while {model} was quantized ({_weight_bytes(model)} bytes of weights): "
            f"{error}; give the process more memory, or lower calibration.max_length"
        ) from error
    model_files.check_weights(out, "quantize")
    model_files.check_side_files(out, model, "quantize")
    return {
        **result,
        "size_before": _weight_bytes(model),
        "size_after": _weight_bytes(out),
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_bytes": oneshot_run.peak_bytes(),
    }


def _quantized(job: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe, run and judged; with `mixed_precision` run again on fewer layers."""
    model, out = Path(job["model"]), Path(job["out_dir"])
    modules = module_list(model)
    recipe, group_size = quantization_plan.resolve(job["recipe"], modules)
    plan = quantization_plan.plan_recipe(recipe, modules)
    plan.check("recipe")
    if problems := checkpoint_checks.not_in_checkpoint(model, plan.planned):
        raise StageFailed(problems)
    rows = calibration_texts.read(job["calibration_file"], int(job["samples"]), int(job["seed"]))
    if quantization_recipe.needs_data(recipe) and not rows:
        raise StageFailed(
            Problem("calibration", "the recipe looks at data and there is none", "add it")
        )
    keeping = job.get("mixed_precision")
    if keeping and quantization_recipe.rotates(recipe):
        raise StageFailed(Problem("mixed_precision", _ROTATED, "remove one of the two"))
    if keeping and (keeping["keep_worst"] or 0) >= len(plan.planned):
        raise _all_kept(plan)
    runs = _Runs(job, modules, rows)
    with tempfile.TemporaryDirectory(dir=out, prefix=".inputs-") as recorded:
        runs.recorded = Path(recorded)
        facts = runs.quantize(recipe, plan, out)
        kept: list[str] = []
        if keeping:
            kept = layer_errors.to_keep(facts["layer_errors"], modules, **keeping)
        if kept:
            if set(plan.planned) <= set(kept):
                raise _all_kept(plan)
            _empty(out, keep=runs.recorded)
            recipe = quantization_recipe.with_ignored(recipe, kept)
            plan = quantization_plan.plan_recipe(recipe, modules)
            plan.check(f"recipe without the {len(kept)} layers that `mixed_precision` keeps")
            facts = {**runs.quantize(recipe, plan, out), "errors_before": facts["layer_errors"]}
        comparison = runs.compare(recipe, plan, facts) if job.get("compare_file") else None
    facts |= {"kept": kept, "group_size": group_size, "comparison": comparison}
    told = {key: value for key, value in facts.items() if key not in oneshot_run.MEASURED}
    quantization_report.write(out, told)
    errors = facts.pop("layer_errors")
    facts.pop("errors_before", None)
    return {
        **facts,
        "mean_error": _mean(errors),
        "worst": layer_errors.worst(errors, quantization_report.WORST),
    }


_ROTATED = "errors of layers are not measured where SpinQuant rotates their inputs"


def _all_kept(plan: quantization_plan.Plan) -> StageFailed:
    return StageFailed(
        Problem(
            "mixed_precision",
            f"all {len(plan.planned)} layers would stay in 16 bit: nothing is left to quantize",
            "keep fewer (engines merge q, k, v and gate, up: they stay together)",
        )
    )


class _Runs:
    """What is read once for every run of a recipe: texts, the unquantized model's measurements."""

    def __init__(
        self,
        job: Mapping[str, Any],
        modules: Sequence[quantization_plan.Module],
        rows: Sequence[calibration_texts.Row],
    ) -> None:
        from transformers import AutoTokenizer

        self.job, self.modules, self.rows = job, modules, rows
        self.model = Path(job["model"])
        self.tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        self.held_rows = calibration_texts.read_held_out(job.get("held_out_file"))
        encoded = [
            calibration_texts.encode_answer(row, self.tokenizer, HELD_OUT_LENGTH)
            for row in self.held_rows
        ]
        self.held = calibration_texts.within(encoded, HELD_OUT_TOKENS, HELD_OUT_TEXTS)
        self.compared = calibration_texts.read(
            job.get("compare_file"), int(job["samples"]), int(job["seed"])
        )
        self.before: float | None = None
        self.recorded: Path | None = None

    def quantize(
        self, recipe: Mapping[str, Any], plan: quantization_plan.Plan, out: Path
    ) -> dict[str, Any]:
        """One run of llmcompressor into `out`, checked. Raises `StageFailed`."""
        facts = self._run(recipe, plan, self.rows, out)
        facts |= checkpoint_checks.verify_written(
            self.model, out, plan.planned, self.modules, self.job["max_size_ratio"]
        )
        facts["kv_cache"] = (
            checkpoint_checks.verify_kv_cache(out, self.modules) if plan.kv_cache else 0
        )
        facts |= checkpoint_checks.verify_untouched(
            self.model, out, plan.planned, self.modules, recipe
        )
        return facts | self._judge(recipe, plan, out)

    def compare(
        self, recipe: Mapping[str, Any], plan: quantization_plan.Plan, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The same recipe on texts of another kind: perplexity and layer errors of both."""
        job = self.job
        with tempfile.TemporaryDirectory(dir=job["out_dir"], prefix=".compared-") as folder:
            try:
                self._run(recipe, plan, self.compared, Path(folder))
                other = self._judge(recipe, plan, Path(folder), limit=float("inf"))
            except StageFailed as error:  # of texts that are only compared: no fault of the stage
                said = str(error).replace(folder, job["compare_names"][1])
                other = {"perplexity": None, "layer_errors": {}, "failed": said}
        return {
            name: {
                "perplexity": (found["perplexity"] or {}).get("after"),
                "mean_error": _mean(found["layer_errors"]),
                "largest_error": max(_measured(found["layer_errors"]), default=None),
                "failed": found.get("failed"),
            }
            for name, found in zip(job["compare_names"], (facts, other), strict=True)
        }

    def _run(
        self,
        recipe: Mapping[str, Any],
        plan: quantization_plan.Plan,
        rows: Sequence[calibration_texts.Row],
        out: Path,
    ) -> dict[str, Any]:
        """Load, measure the unquantized model the first time, quantize, save, let go."""
        max_length = int(self.job["max_length"])
        ids, counted = calibration_texts.encode(rows, self.tokenizer, max_length)
        loaded, dtype = oneshot_run.load(self.model, int(self.job["seed"]))
        try:
            if self.before is None:
                self._measure(loaded, plan, recipe, ids)
            facts = oneshot_run.oneshot(loaded, self.tokenizer, recipe, ids, max_length, out)
        finally:
            oneshot_run.let_go(loaded)
        model_files.copy_side_files(self.model, out)
        return {
            "recipe": dict(recipe),
            "linear_layers": plan.linear_layers,
            "layers": len(plan.planned),
            "calibration": counted,
            "compute_dtype": str(dtype).removeprefix("torch."),
            **facts,
        }

    def _measure(
        self,
        loaded: Any,
        plan: quantization_plan.Plan,
        recipe: Mapping[str, Any],
        ids: Sequence[Sequence[int]],
    ) -> None:
        """Perplexity of the unquantized model, and what goes into and out of its layers."""
        texts = ids or [held for held, _ in self.held]
        with oneshot_run.on_accelerator(loaded):
            self.before = 0.0
            if self.held:
                self.before = text_loss.perplexity(loaded, self.held, str(self.model))
            if self.recorded and texts and not quantization_recipe.rotates(recipe):
                recorder = layer_errors.Recorder(loaded, plan.planned, self.recorded)
                recorder.record(loaded, texts)

    def _judge(
        self,
        recipe: Mapping[str, Any],
        plan: quantization_plan.Plan,
        out: Path,
        limit: float | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint as transformers does, and let it speak. Raises `StageFailed`."""
        allowed = limit or float(self.job.get("max_perplexity_ratio") or 1.5)
        loaded = oneshot_run.load_written(out)
        with oneshot_run.on_accelerator(loaded):
            samples = self._first_tokens(loaded, out)
            perplexity = self._perplexity(loaded, out, allowed)
            errors: dict[str, float | None] = {}
            missing = _ROTATED if quantization_recipe.rotates(recipe) else "there were no texts"
            if self.recorded and any(self.recorded.iterdir()):
                original = None
                if quantization_recipe.rescales(recipe):
                    read = checkpoint_checks.tensor_reader(self.model)
                    original = _weights(read)
                errors = layer_errors.relative_errors(loaded, plan.planned, self.recorded, original)
        _check_finite(errors, str(out))
        return {
            "samples": samples,
            "perplexity": perplexity,
            "layer_errors": errors,
            "layer_errors_missing": missing,
        }

    def _perplexity(self, loaded: Any, out: Path, limit: float) -> dict[str, Any] | None:
        if not self.held or self.before is None:
            return None
        after = text_loss.perplexity(loaded, self.held, str(out))
        ratio = after / self.before
        if ratio > limit:
            raise StageFailed(
                Problem(
                    str(out),
                    f"perplexity on {len(self.held)} held-out answers is {after:.4f}, it was "
                    f"{self.before:.4f} before: {ratio:.2f} times as much, the recipe allows "
                    f"{limit}",
                    "quantize less (`mixed_precision`, more bits), calibrate on texts of the kind "
                    "that it will see, or raise `max_perplexity_ratio`",
                )
            )
        found = {"before": self.before, "after": after, "ratio": ratio}
        rounded = {key: round(value, 6) for key, value in found.items()}
        tokens = sum(len(ids) - max(begins, 1) for ids, begins in self.held)
        return {**rounded, "limit": limit, "texts": len(self.held), "tokens": tokens}

    def _first_tokens(self, loaded: Any, out: Path) -> list[dict[str, str]]:
        """A few greedy tokens, from the files as written. Raises `StageFailed` for a model that
        repeats one token whatever it is asked, unless the unquantized one does so too."""
        rows = (self.held_rows or self.rows)[:CHECK_PROMPTS]
        rows = rows or [{"messages": list(model_files.PROBES[0][0])}]
        prompts = [calibration_texts.question(row, self.tokenizer) for row in rows]
        samples, stuck = text_loss.first_tokens(loaded, self.tokenizer, prompts, CHECK_TOKENS)
        if not stuck:
            return samples
        parent, _ = oneshot_run.load(self.model, int(self.job["seed"]))
        with oneshot_run.on_accelerator(parent):
            _, always = text_loss.first_tokens(parent, self.tokenizer, prompts, CHECK_TOKENS)
        if not always:
            raise StageFailed(
                Problem(
                    str(out),
                    f"the model repeats one token and says nothing else: {samples[0]['text']!r}",
                    "quantize less, or calibrate on texts of the kind that it will see",
                )
            )
        return samples


def _check_finite(errors: Mapping[str, float | None], where: str) -> None:
    wrong = [name for name, error in errors.items() if error is not None and not isfinite(error)]
    if wrong:
        raise StageFailed(
            Problem(
                where,
                f"outputs of {len(wrong)} layers are not finite on calibration texts, before or "
                f"after: {', '.join(wrong[:10])}",
                "look at the weights of these layers in the student",
            )
        )


def _weights(read: Any) -> Any:
    return lambda layer: read(f"{layer}.weight")


def _measured(errors: Mapping[str, float | None]) -> list[float]:
    return [error for error in errors.values() if error is not None]


def _mean(errors: Mapping[str, float | None]) -> float | None:
    measured = _measured(errors)
    return round(sum(measured) / len(measured), 6) if measured else None


def _empty(out: Path, keep: Path) -> None:
    for path in out.iterdir():
        if path.is_file() and path != keep:
            path.unlink()


def _weight_bytes(folder: Path) -> int:
    return sum(tensor.size for tensor in model_files.stored_tensors(folder).values())


if __name__ == "__main__":
    job_main(run)
