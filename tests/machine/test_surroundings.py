"""An environment that is too small or odd is refused by name, or is what a bad end is put down to.

Real limits, network namespaces and preloaded clocks, in processes of their own.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runbook.machine.surroundings import (
    CPU,
    FILE,
    FILES,
    MEMORY,
    TASKS,
    limit_met,
    nothing_starts,
    surroundings_problems,
)
from runbook.records import LaunchStatus
from tests.factory.tables import table
from tests.launch.helpers import fake_launch, run

_RUNBOOK = [sys.executable, "-P", "-m", "runbook"]
_RUN = shlex.join([*_RUNBOOK, "run", "--profile", "cpu"])
_ASK = shlex.join(
    [sys.executable, "-P", "-c",
     "from runbook.machine.surroundings import surroundings_problems as ask; print(ask())"]
)  # fmt: skip
_CLOCK = Path(__file__).with_name("clock_stand_in.c")


def shell(line: str, cwd: Path, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, "bash", "-c", line],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def apart(flags: str, cwd: Path, setup: str = "true") -> list[str]:
    """The beginning of a command in namespaces of its own, in which this can be set up."""
    words = ["unshare", flags]
    if shutil.which("unshare") is None or shell(setup, cwd, *words).returncode:
        pytest.skip(f"this machine does not permit it: unshare {flags}, then {setup}")
    return words


def refused(line: str, cwd: Path, named: str, way: str, *before: str) -> None:
    """A run that is not started, which names what is wrong and the way; typed, that mends it."""
    told = shell(f"{line}; {_RUN} --phase baseline --out out", cwd, *before)
    assert told.returncode == 2, told.stderr
    assert named in told.stderr and not (cwd / "out").exists()
    assert f"`{way}`" in told.stderr
    assert shell(f"{line}; {way}; {_ASK}", cwd, *before).stdout == "[]\n"


@table(__file__, "limits_too_small")
def test_a_limit_that_no_run_fits_into_is_refused_and_the_printed_way_lifts_it(
    tmp_path: Path, limit: str, named: str, lifted: str
) -> None:
    refused(f"ulimit {limit}", tmp_path, named, f"ulimit {limit.split()[1]} {lifted}")


def test_without_the_kernels_own_files_nothing_starts(tmp_path: Path) -> None:
    hidden = "mount -t tmpfs none /proc"
    before = apart("-rm", tmp_path, hidden)
    told = shell(f"{hidden}; {_RUN} --phase baseline --out out", tmp_path, *before)
    assert told.returncode == 2 and "`mount -t proc proc /proc`" in told.stderr, told.stderr
    assert not (tmp_path / "out").exists()


def test_a_python_that_this_user_cannot_start_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in the home of another user, whose virtual environment was copied."""
    python = tmp_path / "python"
    python.touch(0o644)
    monkeypatch.setattr(sys, "executable", str(python))
    (problem,) = surroundings_problems()
    assert f"{python}: Permission denied; `env -i {python} -c pass` has to work" in problem


def test_too_little_room_for_temporary_files_is_refused(tmp_path: Path) -> None:
    """What nothing can be written to is passed over; here a first file still finds room."""
    small = f"mount -t tmpfs -o size=16k none {tmp_path} && cd /"
    before = apart("-rm", tmp_path, small)
    told = shell(f"{small}; TMPDIR={tmp_path} {_ASK}", tmp_path, *before)
    assert "set TMPDIR to another folder" in told.stdout, told


def test_a_command_that_reads_is_refused_too_where_numpy_would_ask_for_memory_without_end(
    tmp_path: Path,
) -> None:
    told = shell(f"ulimit -S -v 307200; {shlex.join(_RUNBOOK)} verify out", tmp_path)
    assert told.returncode == 2 and "and runbook verify needs 2 GiB" in told.stderr, told.stderr


@pytest.mark.parametrize(
    ("state", "way"),
    [
        ("true", "ip link set lo up"),
        ("ip link set lo up; ip addr flush dev lo", "ip addr add 127.0.0.1/8 dev lo"),
    ],
)
def test_without_a_loopback_network_nothing_waits_for_it(
    tmp_path: Path, state: str, way: str
) -> None:
    if shutil.which("ip") is None:
        pytest.skip("no `ip` here to make the network and to type the printed command with")
    before = apart("-rn", tmp_path)
    refused(state, tmp_path, "no loopback network", way, *before)


@pytest.mark.parametrize(
    ("clock", "named"),
    [
        ("-DAHEAD=172800", "172800 s ahead of the one of the processes that it starts"),
        ("-DSTILL=4102444800", "stands still at 4102444800 s since 1970"),
    ],
)
def test_a_clock_that_reaches_the_harness_and_not_its_ranks_is_refused(
    tmp_path: Path, clock: str, named: str
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the stand-in for a clock cannot be built")
    library = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", clock, "-o", library, _CLOCK], check=True)
    told = shell(f"{_RUN} --phase baseline --out out", tmp_path, LD_PRELOAD=str(library))
    assert told.returncode == 2, told.stderr
    assert named in told.stderr and f"`unset LD_PRELOAD` ({library})" in told.stderr
    assert not (tmp_path / "out").exists()
    assert shell(f"unset LD_PRELOAD; {_ASK}", tmp_path, LD_PRELOAD=str(library)).stdout == "[]\n"


@contextmanager
def soft_limit(number: int, size: int) -> Iterator[None]:
    before = resource.getrlimit(number)
    resource.setrlimit(number, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(number, before)


def met(
    cause: str, folder: Path, *signals: str, duration_s: float = 1e9, free: int = 1 << 50
) -> str:
    return limit_met(cause, signals=signals, duration_s=duration_s, folder=folder, least_free=free)


@table(__file__, "ends_by_limits")
def test_an_end_is_put_down_to_a_limit_only_where_the_machine_sets_one(
    tmp_path: Path, flag: str, size: int, cause: str, signal: str
) -> None:
    """A trainer that limits itself, or only says so, ends by its own fault."""
    (allowance,) = (one for one in (*MEMORY, CPU, FILE, FILES, TASKS) if one.flag == flag)
    assert met(cause, tmp_path, signal) == ""
    with soft_limit(allowance.number, size):
        told = met(cause, tmp_path, signal)
        assert f"`ulimit {allowance.flag} {allowance.lifted}`" in told
        assert met("RuntimeError: shapes differ", tmp_path) == ""
        assert met("CUDA out of memory. Tried to allocate 2.00 GiB", tmp_path) == ""
        # So short a launch has not computed for that long.
        short = met(cause, tmp_path, signal, duration_s=1.0)
        assert (short == "") is (allowance is CPU)


def test_a_full_disk_is_to_blame_only_where_it_was_seen_to_be_full(tmp_path: Path) -> None:
    said = "OSError: [Errno 28] No space left on device: 'training.csv'"
    assert met(said, tmp_path) == ""
    told = met(said, tmp_path, free=5 << 20)
    assert f"the disk of {tmp_path} is full" in told and "as little as 5.0 of" in told
    assert "`df -h`" in told
    # A rank whose files are full cannot say a word; another fault has room to be told.
    assert "is full" in met("rank 0 ended: exit code 1", tmp_path, free=0)
    assert met("rank 0 ended: exit code 1", tmp_path, free=5 << 20) == ""


def test_a_launch_that_meets_the_limit_of_the_machine_is_no_fault_of_its_trainer(
    tmp_path: Path,
) -> None:
    with soft_limit(resource.RLIMIT_AS, 1 << 40):
        result = run(fake_launch("--fault", "allocate"), tmp_path)
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR, result.cause
    assert "more than 1024 GiB of memory (`ulimit -v`)" in result.cause
    assert "MemoryError" in result.cause


def test_who_leaks_threads_where_there_is_room_for_them_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "terminate called after throwing: what():  Resource temporarily unavailable"
    for limit, blamed in ((None, False), (1024, False), (1023, True)):
        monkeypatch.setattr("runbook.machine.surroundings.group_tasks", lambda found=limit: found)
        told = limit_met(
            "rank 0 was ended by SIGABRT",
            console=[said],
            duration_s=1.0,
            folder=tmp_path,
            least_free=1 << 50,
        )
        assert ("(pids.max)" in told) is blamed
    said = nothing_starts(RuntimeError("can't start new thread"))
    assert "`ulimit -u 4096`" in said and "--pids-limit" in said
    assert nothing_starts(RuntimeError("another one")) == ""


_FILLS = """
from pathlib import Path
from tests.launch.helpers import fake_launch, run
result = run(fake_launch("--fault", "fill", "--on-rank", "0"), Path("small").resolve())
print(result.status, result.cause)
"""


def test_a_disk_that_a_launch_fills_is_named_with_its_room(tmp_path: Path) -> None:
    """What was written is gone again when the launch has ended: the launcher looked meanwhile."""
    (tmp_path / "small").mkdir()
    mount = "mount -t tmpfs -o size=1500k none small"
    words = apart("-rm", tmp_path, mount)
    line = f"{mount} && {shlex.join([sys.executable, '-c', _FILLS])}"
    told = shell(line, tmp_path, *words)
    assert told.stdout.startswith("environment_error the disk of "), told.stderr + told.stdout
    assert "No space left on device" in told.stdout and "of 1 MiB were free" in told.stdout
