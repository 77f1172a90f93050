"""The Triton kernels between the branches, without a GPU, as in `test_triton`."""

from __future__ import annotations

import json

import pytest

from tests.attention.between_mutants import (
    MIX_IN_32_BITS,
    MIX_MUTANTS,
    POOL_IN_32_BITS,
    POOL_MUTANTS,
    RACES,
    RANGES_MUTANTS,
)
from tests.attention.triton_process import found, interpreted, needs_triton

OF = "between_in_interpreter"
MUTANTS = MIX_MUTANTS | RANGES_MUTANTS | POOL_MUTANTS
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
@pytest.mark.parametrize("name", (*MIX_IN_32_BITS, *POOL_IN_32_BITS))
def test_offsets_of_32_bits_are_seen(name: str) -> None:
    """They wrap around: other numbers are read, or nobody's."""
    ran = interpreted(name, of=OF)
    assert ran.returncode < 0 or json.loads(ran.stdout)[name], ran.stderr
