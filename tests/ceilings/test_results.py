"""What a device or a link returns is held against what it must be, and told where it is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa.ceilings import measure
from nsa.ceilings.measure import Bench
from nsa.contract import Ceiling
from nsa.launch.plan import Place
from nsa.launch.ranks import Ranks

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]


def bench(monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, *, ranks: int = 1) -> Bench:
    sizes = {**vars(measure.ON_CPU), "matmul": 256, "dtype": kind, "memory_bytes": 1024}
    monkeypatch.setattr(measure, "ON_CPU", measure.Sizes(**sizes))
    place = Place(rank=0, local_rank=0, world_size=ranks, nodes=1, from_torchrun=True)
    return Bench(Ranks(place=place, device=CPU, grouped=ranks > 1))


def wrong_of(made: Bench, what: Ceiling) -> str:
    entry = made.measure(what)
    assert entry is not None and set(entry) <= {
        *("dtype", "size", "bytes", "ranks", "inner", "seconds", "host_s", "rate", "unit", "wrong")
    }
    return str(entry.get("wrong", ""))


def flipped(entry: tuple[int, int], by: float, first: int) -> Callable[..., Any]:
    """A product with one wrong number from this call on, so that it repeats itself or does not.

    The exact product, of new memory, counts as the first call.
    """
    true, calls = torch.mm, count()

    def broken(one: Any, other: Any, *, out: Any = None) -> Any:
        product = true(one, other) if out is None else true(one, other, out=out)
        if (next(calls) if out is not None else 0) >= first:
            product[entry] += by
        return product

    return broken


ROW, CHANGES = "1 of 256 rows of an exact product are wrong", "two products of the same matrices"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("entry", "by", "first", "wanted"),
    [
        ((0, 0), 0.0, 0, ""),
        ((0, 0), 1.0, 0, ROW),
        ((255, 17), -1.0, 0, ROW),
        ((0, 0), 1.0, 1, f"{CHANGES} differ"),
    ],
)
def test_one_wrong_number_of_a_product_is_told(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, entry: tuple[int, int], by: float,
    first: int, wanted: str,
) -> None:  # fmt: skip
    made = bench(monkeypatch, kind)
    monkeypatch.setattr(torch, "mm", flipped(entry, by, first))
    assert wrong_of(made, Ceiling.MATMUL) == wanted


CALLS = count()
# What one of three ranks, which all add theirs, makes of a sum.
SPOILED: dict[str, Callable[[torch.Tensor], object]] = {
    "one number": lambda tensor: tensor[0].add_(1.0),
    "one of several calls": lambda tensor: tensor.add_(float(next(CALLS) == 3)),
    "a sum of zeros": lambda tensor: tensor[5].add_(float(not tensor.any())),
    "places are exchanged": lambda tensor: tensor.copy_(tensor.flip(0)),
}


@pytest.mark.parametrize("name", [*SPOILED, ""])
def test_a_wrong_sum_of_all_ranks_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = bench(monkeypatch, torch.float32, ranks=3)

    def all_reduce(tensor: torch.Tensor) -> None:
        """Rank 0 has once its place's number, the others twice and three times."""
        tensor.mul_(6.0)
        if name:
            SPOILED[name](tensor)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(Bench, "wait_for_all", lambda _: None)
    said = wrong_of(made, Ceiling.ALL_REDUCE)
    assert said == ("the sum of all ranks is wrong" if name else "")


def test_a_copy_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, true = bench(monkeypatch, torch.float32), torch.Tensor.copy_

    def broken(target: Any, source: Any, **options: Any) -> Any:
        copied = true(target, source, **options)
        if target.dtype == torch.uint8:
            copied[7] ^= 4
        return copied

    monkeypatch.setattr(torch.Tensor, "copy_", broken)
    assert wrong_of(made, Ceiling.MEMORY_COPY) == "a copy differs from its source"
