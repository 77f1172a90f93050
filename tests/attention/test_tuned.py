"""What was measured on a device takes the place of what is assumed, there and for that shape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.attention.triton import (
    Tile,
    choose_compressed_cut,
    choose_selected_cut,
    choose_window_cut,
    launch,
)
from nsa.attention.triton.operators import config_of
from nsa.config import NSAConfig
from tests.factory.tables import rows, table

CFG = NSAConfig()
SHIPPED = Path(launch.__file__).parent / "tuned"
DEVICE = "NVIDIA Made-Up 80GB (HBM3)"
CHOICES = rows(__file__, "choices")
# What is assumed where nothing was measured.
CUTS: dict[str, Callable[..., Any]] = {
    "selected": choose_selected_cut,
    "compressed": choose_compressed_cut,
    "top": choose_compressed_cut,
    "window": choose_window_cut,
}


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the file of a made-up device says, the only one here."""
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    shapes = launch.shapes_of(CFG, 2)
    document = {
        "device": DEVICE,
        "capability": "9.0",
        "shapes": shapes,
        "lengths": {branch: [2048, 32768] for branch in shapes},
        "choices": CHOICES,
    }
    launch.file_of(DEVICE).write_text(json.dumps(document))
    launch._with_choices.cache_clear()
    return document


def applied(
    branch: str, seq_len: int, cfg: NSAConfig = CFG, assumed: NSAConfig = CFG, **other: Any
) -> tuple[Any, Any]:
    """The cut that is assumed, and what a device makes of it."""
    told: dict[str, Any] = {"itemsize": 2, "device": DEVICE, "capability": "9.0"} | other
    cut = CUTS[branch](assumed, seq_len, 2)
    return cut, launch._with_choices(branch, cut, cfg, seq_len, **told)


def test_only_what_was_measured_is_exchanged() -> None:
    cut, found = applied("window", 2048)
    assert found == dataclasses.replace(cut, forward=Tile(**CHOICES[0]["value"])) != cut


@table(__file__, "lengths")
def test_the_nearest_length_counts(branch: str, field: str, seq_len: int, value: int) -> None:
    assert getattr(applied(branch, seq_len)[1], field) == value


@pytest.mark.parametrize(
    "other",
    [
        {"cfg": dataclasses.replace(CFG, w=256)},
        {"itemsize": 4},
        {"device": "another", "capability": "8.0"},
    ],
    ids=("shape", "type", "device"),
)
def test_what_was_not_measured_keeps_what_is_assumed(other: dict[str, Any]) -> None:
    cut, found = applied("window", 2048, **other)
    assert found == cut


def test_a_cpu_and_a_branch_that_was_not_measured_keep_it_too(measured: dict[str, Any]) -> None:
    cut = choose_window_cut(CFG, 2048, 2)
    assert launch.cut_of("window", torch.zeros(1, 2048, 2, 6, 64), CFG) == cut
    del measured["lengths"]["window"]
    launch.file_of(DEVICE).write_text(json.dumps(measured))
    assert applied("window", 2048)[1] == cut


def test_a_device_without_a_file_takes_one_of_its_capability() -> None:
    assert applied("window", 2048, device="another") == applied("window", 2048)
    own = {"device": "another", "capability": "9.0", "shapes": {}, "choices": []}
    assert launch.measured("another", "9.0") != own
    launch.file_of("another").write_text(json.dumps(own))
    assert launch.measured("another", "9.0") == own
    assert launch.measured(DEVICE, "9.0") != own


def test_an_operator_knows_enough_of_the_config() -> None:
    """It is told numbers, no config: what it makes of them has to count as the same shape."""
    q = torch.empty(1, 8, CFG.n_kv_groups, CFG.heads_per_group, CFG.d_k)
    v = torch.empty(1, 8, CFG.n_kv_groups, CFG.d_v)
    made = {
        "selected": config_of(q, v, l_sel=CFG.l_sel, n_sel=CFG.n_sel),
        "compressed": config_of(q, v, l=CFG.l, d=CFG.d),
        "top": config_of(q, q, l=CFG.l, d=CFG.d, l_sel=CFG.l_sel, n_sel=CFG.n_sel),
        "window": config_of(q, v, w=CFG.w),
    }
    told = {name: launch.shape_of(name, cfg, 2) for name, cfg in made.items()}
    assert told == launch.shapes_of(CFG, 2)


def test_what_is_shipped_fits_the_cuts_as_they_are() -> None:
    """A field that was renamed, or a value of another kind, would be an error on that device."""
    for path in SHIPPED.glob("*.json"):
        document = json.loads(path.read_text())
        assert path.name == launch.file_of(document["device"]).name
        assert document["shapes"] == launch.shapes_of(CFG, 2)
        assert document["choices"] and document["lengths"].keys() == document["shapes"].keys()
        for one in document["choices"]:
            assert one["seq_len"] in document["lengths"][one["branch"]]
            value, cut = launch.value_of(one), CUTS[one["branch"]](CFG, one["seq_len"], 2)
            assert type(launch.get(cut, one["field"])) is type(value)
            assert launch.get(launch.put(cut, one["field"], value), one["field"]) == value
