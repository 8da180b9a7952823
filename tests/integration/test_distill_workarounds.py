"""Each of these fails when a library no longer needs what we do around it: then ours can go."""

from __future__ import annotations

import inspect
from pathlib import Path

from tests.integration.distill_builders import student


def test_transformers_length_groups_come_from_the_global_random_state() -> None:
    """transformers 5.17; `training_loop.ordered` takes the order from seed and epoch."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return list(LengthGroupedSampler(4, lengths=list(range(40)), model_input_name="input_ids"))

    assert order(0) == order(0) != order(1)


def test_peft_leaves_modules_to_save_in_bfloat16(tmp_path: Path) -> None:
    """peft 0.21; `adapters.adapted` brings them to float32."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(student(tmp_path / "m"), dtype=torch.bfloat16)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    kinds = {
        "saved" if "modules_to_save" in name else "adapter": part.dtype
        for name, part in peft.get_peft_model(model, config).named_parameters()
        if part.requires_grad
    }
    assert kinds == {"saved": torch.bfloat16, "adapter": torch.float32}


def test_torch_knows_no_numbered_cpu(tmp_path: Path) -> None:
    """torch 2.13 with transformers 5.17; `training_loop.read_numbered_cpus` lets it."""
    import subprocess
    import sys

    program = (
        "import torch, sys\n"
        "torch.save(torch.ones(2), sys.argv[1])\n"
        "try:\n    torch.load(sys.argv[1], map_location=torch.device('cpu', 1))\n"
        "except RuntimeError:\n    pass\nelse:\n    raise SystemExit('it does')\n"
        "from tasks.engines import training_loop\n"
        "training_loop.read_numbered_cpus()\n"
        "assert torch.load(sys.argv[1], map_location=torch.device('cpu', 1)).sum() == 2\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "one.pt")], check=True)


def test_gkd_takes_the_count_from_before_the_answers_were_written() -> None:
    """trl 1.16; `LogitTrainer` lets every loss be a mean over the tokens that are there."""
    from trl.experimental.gkd import GKDTrainer

    assert "num_items_in_batch=num_items_in_batch" in inspect.getsource(GKDTrainer.compute_loss)
    assert "num_processes" not in inspect.getsource(GKDTrainer.compute_loss)
    assert "num_items_in_batch =" not in inspect.getsource(GKDTrainer.training_step)
