"""The Triton kernels between the branches, without a GPU, as in `test_triton`."""

from __future__ import annotations

import json

import pytest

from tests.attention.between_mutants import MIX_MUTANTS, RACES, RANGES_MUTANTS
from tests.attention.triton_process import found, interpreted, needs_triton

OF = "between_in_interpreter"


@needs_triton
@pytest.mark.slow
def test_what_is_between_the_branches_is_the_equations() -> None:
    names = ("mix_values", "mix_operator", "mix_far_apart", "ranges_values", "ranges_operator")
    assert found(*names, of=OF) == {name: [] for name in names}


@needs_triton
@pytest.mark.slow
def test_planted_defects_are_seen() -> None:
    """Each in a copy of its own; the control, which changes nothing, is seen as nothing."""
    told = found(*MIX_MUTANTS, *RANGES_MUTANTS, of=OF)
    controls = {"mix_control", "ranges_control"}
    assert {name for name, problems in told.items() if not problems} == controls
    for name in RACES:
        assert any("more than one writer" in text for text in told[name])


@needs_triton
@pytest.mark.slow
def test_offsets_of_32_bits_are_seen() -> None:
    """They wrap around: other numbers are read, or nobody's."""
    ran = interpreted("mix_in_32_bits", of=OF)
    assert ran.returncode < 0 or json.loads(ran.stdout)["mix_in_32_bits"], ran.stderr
