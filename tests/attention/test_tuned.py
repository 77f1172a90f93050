"""What was measured on a device takes the place of what is assumed, there and for that shape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.attention.triton import launch
from nsa.attention.triton.operators import config_of
from nsa.attention.triton.selected_tiles import choose_cut
from nsa.attention.triton.tiles import Tile, choose_compressed_cut, choose_window_cut
from nsa.config import NSAConfig

CFG = NSAConfig()
DEVICE = "NVIDIA Made-Up 80GB (HBM3)"
CHOICES = [
    {
        "branch": "window",
        "seq_len": 2048,
        "field": "forward",
        "value": {"rows": 64, "warps": 4, "stages": 3},
    },
    {"branch": "compressed", "seq_len": 2048, "field": "keys", "value": 64},
    {"branch": "compressed", "seq_len": 32768, "field": "keys", "value": 16},
    {"branch": "top", "seq_len": 2048, "field": "blocks", "value": 32},
    {
        "branch": "selected",
        "seq_len": 32768,
        "field": "by_block.forward",
        "value": {"rows": 128, "warps": 8, "stages": 1},
    },
]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    shapes = launch.shapes_of(CFG, 2)
    lengths = {branch: [2048, 32768] for branch in shapes}
    document = {
        "device": DEVICE,
        "capability": "9.0",
        "shapes": shapes,
        "lengths": lengths,
        "choices": CHOICES,
    }
    launch.file_of(DEVICE).write_text(json.dumps(document))
    launch._with_choices.cache_clear()
    return tmp_path


def applied(branch: str, cut: Any, seq_len: int, cfg: NSAConfig = CFG, **other: Any) -> Any:
    told: dict[str, Any] = {"itemsize": 2, "device": DEVICE, "capability": "9.0"} | other
    return launch._with_choices(branch, cut, cfg, seq_len, **told)


def test_only_what_was_measured_is_exchanged(measured: Path) -> None:
    cut = choose_window_cut(CFG, 2048, 2)
    found = applied("window", cut, 2048)
    assert found == dataclasses.replace(cut, forward=Tile(rows=64, warps=4, stages=3)) != cut


@pytest.mark.parametrize(("seq_len", "keys"), [(1, 64), (8191, 64), (8193, 16), (131072, 16)])
def test_the_nearest_length_counts(measured: Path, seq_len: int, keys: int) -> None:
    """By ratio: the middle of 2,048 and 32,768 is 8,192."""
    assert applied("compressed", choose_compressed_cut(CFG, seq_len, 2), seq_len).keys == keys


@pytest.mark.parametrize(("seq_len", "blocks"), [(2048, 32), (32768, 16)])
def test_a_length_where_the_assumed_cut_was_best_keeps_it(
    measured: Path, seq_len: int, blocks: int
) -> None:
    """Nothing is chosen there: that is no reason to take another length's choice."""
    assert applied("top", choose_compressed_cut(CFG, seq_len, 2), seq_len).blocks == blocks


def test_the_choice_of_blocks_is_of_their_length_too(measured: Path) -> None:
    """So many blocks at once are other tiles where a block holds other compressed keys."""
    longer = dataclasses.replace(CFG, l_sel=128)
    cut = choose_compressed_cut(longer, 2048, 2)
    assert applied("top", cut, 2048, longer) == cut
    assert applied("compressed", cut, 2048, longer).keys == 64


def test_a_form_that_is_not_taken_gets_nothing(measured: Path) -> None:
    short, long = (choose_cut(CFG, n, 2) for n in (2048, 32768))
    assert applied("selected", short, 2048) == short and short.by_block is None
    found = applied("selected", long, 32768)
    assert found.by_block.forward == Tile(rows=128, warps=8, stages=1)


def test_other_shapes_types_and_devices_keep_what_is_assumed(measured: Path) -> None:
    cut = choose_window_cut(CFG, 2048, 2)
    assert applied("window", cut, 2048, dataclasses.replace(CFG, w=256)) == cut
    assert applied("window", cut, 2048, itemsize=4) == cut
    assert applied("window", cut, 2048, device="another", capability="8.0") == cut
    assert launch.cut_of("window", torch.zeros(1, 2048, 2, 6, 64), CFG) == cut


def test_a_device_without_a_file_takes_one_of_its_capability(measured: Path) -> None:
    cut = choose_window_cut(CFG, 2048, 2)
    assert applied("window", cut, 2048, device="another") == applied("window", cut, 2048) != cut
    own = {"device": "another", "capability": "9.0", "shapes": {}, "choices": []}
    assert launch.measured("another", "9.0") != own
    launch.file_of("another").write_text(json.dumps(own))
    assert launch.measured("another", "9.0") == own
    assert launch.measured(DEVICE, "9.0") != own


def test_a_branch_that_was_not_measured_keeps_what_is_assumed(measured: Path) -> None:
    path = launch.file_of(DEVICE)
    document = json.loads(path.read_text())
    del document["lengths"]["window"]
    path.write_text(json.dumps(document))
    cut = choose_window_cut(CFG, 2048, 2)
    assert applied("window", cut, 2048) == cut


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
    assert {name: launch.shape_of(name, cfg, 2) for name, cfg in made.items()} == launch.shapes_of(
        CFG, 2
    )


def test_what_is_shipped_fits_the_cuts_as_they_are() -> None:
    """A field that was renamed, or a value of another kind, would be an error on that device."""
    cuts = {
        "selected": lambda n: choose_cut(CFG, n, 2),
        "compressed": lambda n: choose_compressed_cut(CFG, n, 2),
        "top": lambda n: choose_compressed_cut(CFG, n, 2),
        "window": lambda n: choose_window_cut(CFG, n, 2),
    }
    for path in (Path(launch.__file__).parent / "tuned").glob("*.json"):
        document = json.loads(path.read_text())
        assert path == launch.file_of(document["device"])
        assert document["shapes"] == launch.shapes_of(CFG, 2)
        assert document["choices"]
        assert document["lengths"].keys() == document["shapes"].keys()
        assert all(
            one["seq_len"] in document["lengths"][one["branch"]] for one in document["choices"]
        )
        for one in document["choices"]:
            value = launch.value_of(one)
            cut = cuts[one["branch"]](one["seq_len"])
            assert type(launch.get(cut, one["field"])) is type(value)
            assert launch.get(launch.put(cut, one["field"], value), one["field"]) == value
