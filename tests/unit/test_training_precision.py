"""bfloat16 where the hardware has it, float32 where it would be emulated."""

from __future__ import annotations

import pytest

from tasks.engines.training_precision import choose


@pytest.mark.parametrize(
    ("capability", "flags", "name"),
    [
        ((9, 0), [], "bfloat16"),
        ((8, 0), [], "bfloat16"),
        ((7, 5), ["avx512_bf16"], "float32"),  # a T4: what its host could do does not count
        (None, ["avx2", "avx512f"], "float32"),
        (None, ["avx2", "avx512f", "avx512_bf16"], "bfloat16"),
        (None, ["amx_bf16", "avx512_bf16"], "bfloat16"),
        (None, ["bf16"], "bfloat16"),  # ARM
        (None, [], "float32"),
    ],
)
def test_the_hardware_decides(
    capability: tuple[int, int] | None, flags: list[str], name: str
) -> None:
    assert choose("auto", capability, flags).name == name


def test_the_recipe_may_decide_and_the_result_says_so() -> None:
    assert choose("float32", (9, 0)).name == "float32"
    asked = choose("bfloat16", (7, 5))
    assert asked.name == "bfloat16"
    assert asked.why == "the recipe says so; CUDA capability 7.5"
    assert choose("auto", None, ["avx512_bf16"]).why == "CPU with avx512_bf16"
    assert choose("auto", None, []).why == "CPU without bfloat16 instructions"
