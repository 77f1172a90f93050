"""The Triton kernels between the branches, without a GPU, as in `test_triton`."""

from __future__ import annotations

import json

import pytest

from tests.attention.defects import defects
from tests.attention.triton_process import found, interpreted, needs_triton

OF = "between_in_interpreter"
MUTANTS = defects("mix", "ranges", "pool")
# What only one program may write is written by several.
RACES = {
    "mix_tiles_in_one_place",
    "ranges_of_one_batch",
    "pool_of_one_pair",
    "pool_gradients_in_one_place",
}
PROOFS = (
    "mix_values",
    "mix_operator",
    "mix_far_apart",
    "ranges_values",
    "ranges_operator",
    "pool_values",
    "pool_operator",
    "pool_far_apart",
)


@needs_triton
@pytest.mark.slow
def test_what_is_between_the_branches_is_the_equations() -> None:
    assert found(*PROOFS, of=OF) == {name: [] for name in PROOFS}


@needs_triton
@pytest.mark.slow
def test_planted_defects_are_seen() -> None:
    """Each in a copy of its own; the controls, which change nothing, are seen as nothing."""
    told = found(*MUTANTS, of=OF)
    controls = {"mix_control", "ranges_control", "pool_control"}
    assert {name for name, problems in told.items() if not problems} == controls
    for name in RACES:
        assert any("more than one writer" in text for text in told[name])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", defects("mix_in_32_bits", "pool_in_32_bits"))
def test_offsets_of_32_bits_are_seen(name: str) -> None:
    """They wrap around: other numbers are read, or nobody's."""
    ran = interpreted(name, of=OF)
    assert ran.returncode < 0 or json.loads(ran.stdout)[name], ran.stderr
