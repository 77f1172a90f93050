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
from nsa.config import NSAConfig
from tests.factory.tables import table

CFG = NSAConfig()
SHIPPED = Path(launch.__file__).parent / "tuned"
DEVICE = "NVIDIA Made-Up 80GB (HBM3)"
CHOICES: dict[str, Any] = {
    "window": {"2048": {"forward": {"rows": 64, "warps": 4, "stages": 3}}, "32768": {}},
    "compressed": {"2048": {"keys": 64}, "32768": {"keys": 16}},
    "top": {"2048": {"blocks": 32}, "32768": {}},
    "selected": {"2048": {}, "32768": {"by_block": {"forward": {"rows": 128}}}},
}
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
    document = {
        "device": DEVICE,
        "capability": "9.0",
        "shapes": launch.shapes_of(CFG, 2),
        "choices": CHOICES,
    }
    (tmp_path / "made_up.json").write_text(json.dumps(document))
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
    assert found == dataclasses.replace(cut, forward=Tile(rows=64, warps=4, stages=3)) != cut


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


def test_a_cpu_and_a_branch_that_was_not_measured_keep_it_too(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    cut = choose_window_cut(CFG, 2048, 2)
    assert launch.cut_of("window", torch.zeros(1, 2048, 2, 6, 64), CFG) == cut
    choices = {name: made for name, made in CHOICES.items() if name != "window"}
    (tmp_path / "made_up.json").write_text(json.dumps(measured | {"choices": choices}))
    assert applied("window", 2048)[1] == cut


def test_a_device_without_a_file_takes_one_of_its_capability(tmp_path: Path) -> None:
    assert applied("window", 2048, device="another") == applied("window", 2048)
    own = {"device": "another", "capability": "9.0", "shapes": {}, "choices": {}}
    assert launch.measured("another", "9.0") != own
    (tmp_path / "another.json").write_text(json.dumps(own))
    assert launch.measured("another", "9.0") == own
    assert launch.measured(DEVICE, "9.0") != own


def test_what_is_shipped_fits_the_cuts_as_they_are() -> None:
    """A field that was renamed, or a value of another kind, would be an error on that device."""
    for path in SHIPPED.glob("*.json"):
        document = json.loads(path.read_text())
        assert document["shapes"] == launch.shapes_of(CFG, 2)
        assert document["choices"].keys() == document["shapes"].keys()
        for branch, lengths in document["choices"].items():
            for length, told in lengths.items():
                cut = CUTS[branch](CFG, int(length), 2)
                put = launch.put(cut, told)
                assert (put != cut) == bool(told)
                assert set(told) == {
                    name for name, value in vars(put).items() if value != getattr(cut, name)
                }
