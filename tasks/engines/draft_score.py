"""What a server would accept of a draft's proposals, expected from recorded states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from tasks.engines.draft_fit import training_row
from tasks.engines.draft_model import draft_targets
from tasks.engines.draft_states import Sample


def score(draft: Any, samples: Sequence[Sample], steps: int) -> dict[str, Any]:
    """What a server would accept of `steps` greedy proposals at a time on `samples`.

    "accuracy"[k]: share of right tokens at proposal k among all places to draft from where the
    proposals before it were right. "acceptance"[k] and "acceptance_length": the answers walked as
    the server walks them, each draft starting after the tokens of the one before; accepted at
    position k over all drafts, and 1 + accepted / drafts (vLLM's mean acceptance length).
    "by_segment": the acceptance length of each. A proposal behind the end of an answer counts as
    wrong. A token that the draft cannot propose is as wrong as any other.
    """
    right, asked, accepted, drafts = [0] * steps, [0] * steps, [0] * steps, 0
    segments: dict[str, list[int]] = {}
    for sample in samples:
        runs = _runs(draft, sample, steps)
        for places in runs.values():
            for step, good in enumerate(places):
                asked[step] += 1
                right[step] += good
        walked = segments.setdefault(sample.segment, [0, 0])
        start = sample.prompt_length - 1
        while start in runs:
            run = sum(runs[start])
            drafts += 1
            walked[0] += 1
            walked[1] += run
            for step in range(run):
                accepted[step] += 1
            start += run + 1
    return {
        "accuracy": [round(r / a, 6) if a else None for r, a in zip(right, asked, strict=True)],
        "acceptance": [round(count / drafts, 6) for count in accepted],
        "acceptance_length": round(1 + sum(accepted) / drafts, 6),
        "by_segment": {
            segment: round(1 + got / made, 6)
            for segment, (made, got) in sorted(segments.items())
            if made
        },
    }


def _runs(draft: Any, sample: Sample, steps: int) -> dict[int, list[bool]]:
    """By place to draft from: whether each proposal is right, up to the first that is not."""
    import torch

    to_target = torch.tensor(draft_targets(draft))
    row = training_row(sample)
    # On CUDA speculators compiles the model; here every sample has another length.
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        proposals = draft(
            hidden_states=row["hidden_states"][None].to(draft.device, draft.dtype),
            input_ids=row["input_ids"][None].to(draft.device),
            document_ids=torch.zeros_like(row["input_ids"])[None].to(draft.device),
            position_ids=row["position_ids"][None].to(draft.device),
            ttt_steps=steps,
        )
    # Row i holds token i+1; its proposal k is for token i+2+k.
    proposed = [to_target[step[0].cpu()].tolist() for step in proposals]
    length = len(sample.tokens)
    runs: dict[int, list[bool]] = {}
    for start in range(sample.prompt_length - 1, length - 2):
        places: list[bool] = []
        for step in range(min(steps, length - 2 - start)):
            places.append(proposed[step][start] == sample.tokens[start + 2 + step])
            if not places[-1]:
                break
        runs[start] = places
    return runs


def coverage(samples: Sequence[Sample], draftable: Collection[int]) -> dict[str, Any]:
    """Share of answer tokens that the draft can propose: of all, and by segment."""
    every, covered = Counter[str](), Counter[str]()
    for sample in samples:
        every[sample.segment] += len(sample.answer)
        covered[sample.segment] += sum(token in draftable for token in sample.answer)
    return {
        "vocab_coverage": round(covered.total() / every.total(), 6),
        "vocab_coverage_by_segment": {
            segment: round(covered[segment] / count, 6) for segment, count in sorted(every.items())
        },
    }
