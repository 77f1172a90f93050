"""What a launch gets of the machine, and that it leaves nothing beside its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runbook.launch.command import Command
from runbook.launch.inputs import build_environment
from runbook.launch.local import Host


def test_only_what_is_installed_is_kept_from_the_folder_of_the_caller() -> None:
    where = {"token": "ab", "run_dir": Path("/runs/x"), "loopback": False}
    assert build_environment({}, {}, installed=True, **where)["PYTHONSAFEPATH"] == "1"

    def ours(*words: str) -> bool:
        return Command(argv=words, env={}, port=None, steps=1).is_ours

    assert ours("python", "-m", "torch.distributed.run", "-m", "nsa.train", "--ddp", "1")
    assert ours("python", "-m", "pytest", "-q", "--pyargs", "nsa.tests.test_modes")
    assert not ours("python", "-m", "nsa.loopback", "-m", "my_trainer")
    assert not ours("python", "train.py")


@pytest.mark.parametrize(
    ("there", "made", "left"),
    [
        ((), ("torchinductor_me/",), ()),
        ((), ("torchinductor_me/cache",), ("torchinductor_me",)),
        (("torchinductor_me/",), (), ("torchinductor_me",)),
        (("torchinductor_you/",), ("torchinductor_me/", "mine/"), ("mine", "torchinductor_you")),
    ],
    ids=("empty", "in use", "before", "of others"),
)
def test_the_folder_that_torch_makes_for_nothing_goes(
    tmp_path: Path, there: tuple[str, ...], made: tuple[str, ...], left: tuple[str, ...]
) -> None:
    (place := tmp_path / "temporary").mkdir()
    (folder := tmp_path / "launch").mkdir()
    for name in there:
        (place / name).mkdir()
    script = f"mkdir -p {' '.join(made)}" if made else ":"
    host = Host(folder, dict(os.environ, TMPDIR=str(place)), token="ab" * 16)
    host.start(["sh", "-c", script], cwd=place)
    host.child.wait()
    host.stop()
    assert tuple(sorted(path.name for path in place.iterdir())) == left
