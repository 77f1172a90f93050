"""A launcher is found by its entry point, and nothing else has to know it."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from runbook.config import registry
from runbook.config.profile import Profile
from runbook.config.registry import names
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.launch import launcher_api
from runbook.launch.command import Command
from runbook.launch.inputs import build_environment
from runbook.launch.local import Host, Local

GROUP = launcher_api.GROUP


class Elsewhere(Local):
    """Another package's launcher, which knows nothing of accounts."""

    here = False

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        return [f"no account is needed for {profile.name}"] if options.account else []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launcher_api.installed(GROUP)
    more = EntryPoint("elsewhere", f"{__name__}:Elsewhere", GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda one: Elsewhere if one is more else _load(one))
    for module in (launcher_api, registry):
        monkeypatch.setattr(module, "installed", lambda _group: (*found, more))


_load = EntryPoint.load


def asked(**options: str) -> RunOptions:
    return RunOptions(phases="preflight", profile="cpu", **options)  # type: ignore[arg-type]


def test_the_shipped_ones_are_found_and_an_unknown_one_is_told() -> None:
    shipped = names(launcher_api.GROUP)
    assert {"local", "slurm"} <= set(shipped)
    told = rf"no such launcher.*there are: {', '.join(shipped)}"
    with pytest.raises(UsageError, match=told):
        prepare(asked(launcher="zzz"))
    with pytest.raises(UsageError, match=r"no such launcher \(did you mean 'local'\?\)"):
        prepare(asked(launcher="lokal"))


@pytest.mark.usefixtures("installed")
def test_another_package_adds_one() -> None:
    assert launcher_api.launcher("elsewhere").here is False
    with pytest.raises(UsageError, match=r"--account is for --launcher (\w+\|)*slurm\|elsewhere"):
        prepare(asked(account="me"))
    with pytest.raises(UsageError, match="no account is needed for cpu"):
        prepare(asked(launcher="elsewhere", account="me"))


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
