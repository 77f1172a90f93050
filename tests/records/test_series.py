"""Curves keep their dips and peaks, and records survive being stored."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.records import Measurement, Table, thin_points


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(2, 60))
def test_thinning_keeps_order_extremes_and_only_real_points(ys: list[float], keep: int) -> None:
    xs = [float(index) for index in range(len(ys))]
    thin = thin_points(xs, ys, keep=keep)
    assert 1 <= len(thin) <= keep
    assert list(thin) == sorted(thin)
    assert set(thin) <= set(zip(xs, ys, strict=True))
    values = [y for _, y in thin]
    assert (min(values), max(values)) == (min(ys), max(ys))


def test_thinning_refuses_fewer_than_two_points() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        thin_points([1.0], [1.0], keep=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_stored_number_that_is_none_comes_back_as_a_number(value: float) -> None:
    measured = Measurement(
        name="x", value=value, unit="", n=1, window=None, path="p", sha256="0" * 64
    )
    again = Measurement.model_validate_json(measured.model_dump_json())
    table = Table(title="t", columns=("a",), rows=((value,),))
    cell = Table.model_validate_json(table.model_dump_json()).rows[0][0]
    assert str(again.value) == str(value)
    assert str(cell) == str(value)
