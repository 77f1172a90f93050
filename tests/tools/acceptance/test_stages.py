"""The shipped list of stages keeps its promises, and a wrong one says all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from runbook.errors import RunbookError, UsageError
from runbook.files import data_path
from runbook.tools.acceptance.pairs import load_pairs
from runbook.tools.acceptance.stages import (
    STAGES_FILE,
    Place,
    find_checkout,
    load_stages,
    select_stages,
)
from tests.cli.shell import inside

NAMES = ["device", "ceilings", "tests", "run", "attention", "step", "evidence"]


def changed(tmp_path: Path, **changes: object) -> Path:
    document = yaml.safe_load((data_path("configs") / STAGES_FILE).read_text())
    document["stages"][0] |= changes
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_the_shipped_stages_fit_into_25_minutes_of_8_at_most() -> None:
    stages = load_stages()
    assert [stage.name for stage in stages] == NAMES
    assert sum(stage.budget_s * stage.parts for stage in stages) <= 25 * 60
    assert max(stage.budget_s for stage in stages) <= 8 * 60


def test_every_program_of_a_stage_is_there_and_takes_its_words() -> None:
    """A word that a program does not know would cost a stage on the device."""
    import importlib.util

    place = Place(checkout=find_checkout(), profile="h200x1", stand_in=False)
    for stage in load_stages():
        for command in stage.commands:
            words = command.words(place.values(Path("out"), 100.0), stand_in=False)
            assert words[1] == "-m" and importlib.util.find_spec(words[2]), words


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget_s": 481}, "less than or equal to 480"),
        ({"budget_s": 480, "parts": 3}, "more than total_s 1500"),
        ({"needs": ["luck"]}, "needs luck; there are: gpu"),
        ({"least_s": 100}, "least_s 100 is more than budget_s 60"),
        ({"name": "tests"}, "occurs twice"),
        ({"commands": [{"name": "x", "argv": ["{where}"]}]}, "unknown placeholder 'where'"),
        ({"colour": "red"}, "colour: Extra inputs"),
    ],
)
def test_a_wrong_list(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_stages(changed(tmp_path, **changes))


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunbookError, match="cannot be read"):
        load_stages(tmp_path / "none.yaml")


def test_selection() -> None:
    stages = load_stages()
    assert [s.name for s in select_stages(["step,device", "tests"], stages)] == [
        "device",
        "tests",
        "step",
    ]
    assert select_stages([], stages) == stages
    with pytest.raises(UsageError, match="did you mean 'tests'"):
        select_stages(["test", "device"], stages)


def test_the_pairs_are_toggles_or_say_that_they_are_not() -> None:
    file = load_pairs()
    assert {"fused_adamw", "ranges_v1", "bucket_25"} <= {
        v.name for v in file.variants if not v.unknown and v.in_launch
    }
    assert set(file.stand_in_variants) <= {variant.name for variant in file.variants}
    for variant in file.variants:
        assert set(variant.set) == set(variant.against)


def test_the_dry_run_starts_nothing(tmp_path: Path) -> None:
    ended = inside("gpu-acceptance", "--dry-run", "--json", cwd=tmp_path)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert [row["stage"] for row in document["stages"]] == NAMES
    assert document["total_s"] <= 1500
    assert list(tmp_path.iterdir()) == []
    text = inside("gpu-acceptance", "--dry-run", "--stand-in", cwd=tmp_path).out
    assert "# STAND-IN: no GPU." in text and "together at most" in text
    assert list(tmp_path.iterdir()) == []
