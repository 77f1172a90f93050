"""Jobs on two real nodes that fail in every way: noticed, named with their node, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runbook.folder.launch.evidence import read_launch
from runbook.launch import LaunchOptions, StopRequest, adopt_launch
from runbook.launch.nodes.files import JOB_JSON, NODE_TOKEN_VARIABLE, last_state
from runbook.process.reaper import carriers
from runbook.records import Launch, LaunchResult, LaunchStatus
from tests.launch.helpers import At
from tests.shared import crowded
from tests.slurm.cluster import Cluster
from tests.slurm.helpers import Notes, launcher, run, two_ranks

pytestmark = pytest.mark.slow


def processes_of(run_dir: Path, node: str) -> list[psutil.Process]:
    """Everything that the agent of a node started."""
    token = json.loads((run_dir / JOB_JSON).read_text())["run_token"]
    found = carriers(f"{token}.{node}", NODE_TOKEN_VARIABLE)
    return [psutil.Process(pid) for pid in found]


def job_id(run_dir: Path) -> int:
    return int(json.loads((run_dir / JOB_JSON).read_text())["job_id"])


def test_a_healthy_launch_leaves_what_one_machine_leaves(cluster: Cluster, tmp_path: Path) -> None:
    launch = two_ranks()
    result = run(launch, tmp_path)
    assert (result.status, result.exit_code, result.cause) == (LaunchStatus.COMPLETED, 0, "")
    told = [(end.rank, end.code, end.steps_done, end.node) for end in result.ranks]
    assert told == [(0, 0, 20, "n0"), (1, 0, 20, "n1")]
    assert result.node == ""
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.problems == ()
    assert evidence.training is not None and len(evidence.training.frame) == 20
    assert evidence.devices_before and evidence.kernel_log and evidence.load
    nodes = json.loads((tmp_path / "slurm_nodes.json").read_text())["nodes"]
    assert nodes == list(cluster.names)
    for index, name in enumerate(nodes):
        said = last_state(tmp_path / launch.run_dir / "nodes" / name)
        assert said is not None and list(said.ranks) == [index]


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("sigkill", LaunchStatus.CRASHED, "rank 1 was ended by SIGKILL"),
        ("raise", LaunchStatus.CRASHED, "ValueError: injected"),
        ("hang", LaunchStatus.HUNG, "hang: rank 1 silent for"),
        ("stop", LaunchStatus.HUNG, "frozen: rank 1 is stopped (T)"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_node(
    cluster: Cluster, tmp_path: Path, fault: str, status: LaunchStatus, words: str
) -> None:
    result = run(two_ranks("--fault", fault), tmp_path)
    assert (result.status, result.culprit_rank) == (status, 1), result
    assert words in result.cause and "rank 1 ran on node n1" in result.cause
    if fault == "hang":
        stacks = [path for path in result.evidence if "stackdump_rank1" in path]
        assert "in fault" in (tmp_path / stacks[0]).read_text()


def test_a_rank_that_is_late_is_named_with_its_node(cluster: Cluster, tmp_path: Path) -> None:
    result = run(two_ranks("--late", "0.2", steps=16), tmp_path)
    assert result.status is LaunchStatus.COMPLETED, result
    # On a busy machine the note may say that it was only short of CPUs.
    (note,) = result.notes
    assert re.search(r"rank 1 on node n1 comes \d+ ms late in each of", note), note
    assert result.node == ("n1" if note.startswith("straggler") else "")


def test_the_ranks_parent_on_a_node_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    def kill(launch: Launch) -> None:
        for process in processes_of(tmp_path / launch.run_dir, "n1"):
            with suppress(psutil.Error):  # some of them come and go
                if "one_rank.py" in " ".join(process.cmdline()):
                    process.kill()

    result = run(two_ranks(steps=2000), tmp_path, observer=At(3, kill))
    assert result.status is LaunchStatus.CRASHED
    assert result.cause.startswith("the ranks' parent on node n1 was ended by SIGKILL")


def test_the_job_is_canceled_by_somebody_else(cluster: Cluster, tmp_path: Path) -> None:
    def cancel(launch: Launch) -> None:
        cluster.tool("scancel", str(job_id(tmp_path / launch.run_dir)))

    result = run(two_ranks(steps=2000), tmp_path, observer=At(3, cancel))
    assert result.status is LaunchStatus.PREEMPTED
    assert "was ended in Slurm by somebody else (state CANCELLED)" in result.cause


def test_a_stop_request_ends_everything_within_five_seconds(
    cluster: Cluster, tmp_path: Path
) -> None:
    stop, asked = StopRequest(), []

    def request(_: Launch) -> None:
        asked.append(time.monotonic())
        stop.request("SIGTERM")

    result = run(two_ranks(steps=2000), tmp_path, observer=At(3, request), stop=stop)
    assert result.status is LaunchStatus.INTERRUPTED
    assert time.monotonic() - asked[0] < crowded(5)
    # A rank that is too slow on a busy machine is ended without its own word.
    assert 13 in {exit_.code for exit_ in result.ranks} <= {13, None}


def test_a_queue_that_never_starts(cluster: Cluster, tmp_path: Path) -> None:
    notes = Notes()
    cluster.tool("scontrol", "update", "nodename=n1", "state=drain", "reason=out for repair")
    try:
        waits = launcher(tmp_path, queue_s=10, notes=notes)
        result = run(two_ranks(), tmp_path, launcher=waits)
    finally:
        cluster.tool("scontrol", "update", "nodename=n1", "state=resume")
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR
    assert "never started" in result.cause and "the limit is 10 s (--queue-s)" in result.cause
    assert "DRAINED" in result.cause
    assert any("waits in the queue" in text for text in notes.said)


def test_what_slurm_refuses_is_told_in_its_words(cluster: Cluster, tmp_path: Path) -> None:
    asks = launcher(tmp_path, partition="no_such")
    result = run(two_ranks(), tmp_path, launcher=asks, retry=True)
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR and result.attempts == 1
    assert result.cause.startswith("sbatch refused the job: ")
    assert "invalid partition" in result.cause


HARNESS = """
import sys
from pathlib import Path
from runbook.records import Launch
from tests.slurm.helpers import run
run(Launch.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


def adopted(launch: Launch, root: Path, notes: Notes) -> LaunchResult | None:
    where = launcher(root, notes=notes)
    how = LaunchOptions(run_root=root, observer=notes, retry=False, launcher=where)
    return adopt_launch(launch, how)


def test_a_harness_that_is_killed_finds_its_job_again(cluster: Cluster, tmp_path: Path) -> None:
    launch = two_ranks("--dt", "0.05", steps=60)
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, launch.model_dump_json(), str(tmp_path)],
        cwd=Path(__file__).parents[2],
    )
    run_dir = tmp_path / launch.run_dir
    deadline = time.monotonic() + 240
    while not (run_dir / "training.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    before, notes = job_id(run_dir), Notes()
    result = adopted(launch, tmp_path, notes)
    assert result is not None and result.status is LaunchStatus.COMPLETED, result
    assert notes.said == [f"one: job {before} outlived its harness and is watched again"]
    assert job_id(run_dir) == before
    assert LaunchResult.model_validate_json((run_dir / "result.json").read_text()) == result
    assert [e.steps_done for e in result.ranks] == [60, 60]
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.training is not None and len(evidence.training.frame) == 60
    assert carriers(result.run_token) == []


def test_nothing_is_adopted_where_no_job_is_left(cluster: Cluster, tmp_path: Path) -> None:
    launch = two_ranks(steps=3)
    run(launch, tmp_path)
    # Its harness saw the end; without that, a job of another token is not this launch's.
    assert adopted(launch, tmp_path, Notes()) is None
    (tmp_path / launch.run_dir / "result.json").unlink()
    path = tmp_path / launch.run_dir / JOB_JSON
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"run_token": "ab" * 16}))
    assert adopted(launch, tmp_path, Notes()) is None


def test_a_node_that_goes_down_is_named(cluster: Cluster, tmp_path: Path) -> None:
    began: list[float] = []

    def power_off(_: Launch) -> None:
        began.append(time.monotonic())
        # The harness must not wait for this.
        threading.Thread(target=cluster.kill_node, args=("n1",)).start()

    try:
        result = run(two_ranks(steps=5000), tmp_path, observer=At(3, power_off))
    finally:
        cluster.bring_back("n1")
    assert result.status is LaunchStatus.HARDWARE_ERROR, result
    assert result.cause.startswith("node n1 is lost: nothing heard from it for ")
    assert result.node == "n1"
    assert time.monotonic() - began[0] < crowded(60)


def test_a_full_shared_disk(cluster: Cluster, tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(root)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.decode().strip()}")

    def fill(_: Launch) -> None:
        with (root / "filler").open("wb", buffering=0) as stream:
            try:
                while True:
                    stream.write(b"x" * 4096)
            except OSError:
                pass

    try:
        with pytest.raises(OSError, match="No space left on device"):
            run(two_ranks(steps=5000), root, observer=At(3, fill))
        token = json.loads((root / "baseline/one" / JOB_JSON).read_text())["run_token"]
        assert carriers(token) == []
        rows = (root / "baseline/one/training.csv").read_text().splitlines()
        assert len(rows) > 3
    finally:
        os.sync()
        subprocess.run(["umount", str(root)], check=True)
