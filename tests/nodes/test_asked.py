"""What is refused of nodes, what Slurm is asked for, and what is read of its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runbook.config.setup import RunOptions
from runbook.engine.on_nodes import _gathered
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.folder import LAUNCH_JSON
from runbook.folder.facts import write_facts
from runbook.folder.launch.documents import GPU_SAMPLES
from runbook.launch import run_launch
from runbook.launch.launcher_api import launcher
from runbook.launch.nodes import chosen, files
from runbook.launch.nodes.files import (
    NODE_JSONL,
    NODES,
    NodeState,
    append_record,
    keep_nodes,
    kept_nodes,
)
from runbook.launch.observer import Observer
from runbook.launch.slurm import JobState, SlurmCluster, agent_script, parse_job
from runbook.launch.supervision import LaunchOptions
from runbook.records.run import NODE_NAMES
from tests.cli.shell import inside
from tests.engine.test_doubt import record
from tests.factory.tables import table
from tests.nodes import helpers

KEPT = "slurm_nodes.json"
ASKED = RunOptions(phases="baseline", profile="cpu", launcher="slurm", nodes=2, partition="gpu")


def test_the_ranks_are_spread_over_the_nodes_and_one_process_has_one() -> None:
    setup = prepare(RunOptions(phases="all", profile="cpu", launcher="slurm", nodes=2))
    spread = [launch for launch in setup.planned if launch.nproc > 1]
    assert spread and all(launch.nodes == 2 for launch in spread)
    assert all(
        launch.argv[:3] == ("torchrun", "--nnodes=2", "--nproc_per_node=1") for launch in spread
    )
    assert all(launch.nodes == 1 for launch in setup.planned if launch.nproc == 1)
    assert {"preflight.nodes", "preflight.nodes_alike"} <= set(setup.required)


@table(__file__, "what_does_not_fit")
def test_what_does_not_fit_is_refused(fields: dict[str, object], words: str) -> None:
    asked: dict[str, object] = {"phases": "baseline", "profile": "cpu"} | fields
    with pytest.raises(UsageError) as refused:
        prepare(RunOptions(**asked))  # type: ignore[arg-type]
    assert words in str(refused.value)


def test_one_machine_does_not_start_what_was_planned_for_two(tmp_path: Path) -> None:
    """As a triage of such a launch would."""
    with pytest.raises(UsageError, match="planned for 2 nodes, and this starts on one machine"):
        run_launch(prepare(ASKED).planned[0], LaunchOptions(run_root=tmp_path, observer=Observer()))
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_prints_the_batch_script(tmp_path: Path) -> None:
    words = ("--phase", "baseline", "--profile", "cpu", "--launcher", "slurm", "--nodes", "2")
    done = inside("run", *words, "--partition", "gpu", "--dry-run", cwd=tmp_path)
    assert done.code == 0
    script = done.out[done.out.index("sbatch <<'JOB'") :]
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --exclusive",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=gpu",
        "export NSA_DDP_BUCKET_MB=0.5",
    ):
        assert line in script.splitlines()
    assert "torchrun --rdzv-backend=c10d" in script and "--nnodes=2 --nproc_per_node=1" in script


@table(__file__, "printed_commands")
def test_the_commands_that_a_report_prints_ask_for_the_cluster_again(
    fields: dict[str, Any], ends: str, takes_out: str
) -> None:
    asked = RunOptions(profile="cpu", nodes=2, **fields).invocation()
    assert asked.line(["baseline"]).endswith(ends.replace("{here}", str(Path.cwd())))
    assert record("cpu", options=asked.options()).invocation == asked
    assert launcher(asked.launcher).takes_out() == takes_out


@table(__file__, "jobs_in_slurm")
def test_a_job_as_slurm_tells_it(said: str, told: dict[str, object]) -> None:
    job = parse_job(said)
    assert {name: getattr(job, name) for name in told} == told


def test_a_folder_with_odd_characters_stays_one_word(tmp_path: Path) -> None:
    folder = tmp_path / "it's %j; rm -rf x"
    assert f"{folder}".replace("'", "'\"'\"'") in agent_script(folder)


@table(__file__, "ends_in_slurm")
def test_what_the_end_of_a_job_means(
    tmp_path: Path, state: str, code: int, log: str, ends: str, said: str
) -> None:
    """A full disk, which one node's agent tells by its exit code, among them."""
    about = files.Job(job_id=4, run_token="ab", nodes=2, nproc=2, argv=("x",))
    job = JobState(state=state, code=code, nodes="n[0-1]")
    (tmp_path / "slurm.log").write_text(log)
    end = job.ended(about, tmp_path, gone=False, silent="1 of its 2 nodes")
    assert end.status == ends and said in end.cause


def test_a_pair_runs_on_its_own_nodes() -> None:
    launch = prepare(ASKED).planned[0].model_copy(update={"on": (0, 2)})
    on = chosen(launch, ("n4", "n7", "n9"))
    assert "--nodelist=n4,n9" in SlurmCluster().words(launch, name="x", on=on)


def test_a_launch_takes_the_first_of_the_nodes_that_are_kept(tmp_path: Path) -> None:
    """However a run begins: what ran on fewer nodes ran on some of those of what has more."""
    assert kept_nodes(tmp_path / KEPT) == ()
    for job, kept in (
        (["n7"], ("n7",)),
        (["n4", "n7", "n9"], ("n7", "n4", "n9")),
        (["n4", "n7"], ("n7", "n4", "n9")),
    ):
        keep_nodes(tmp_path / KEPT, job)
        assert kept_nodes(tmp_path / KEPT) == kept
    launch = prepare(ASKED).planned[0]
    on = chosen(launch, kept_nodes(tmp_path / KEPT))
    assert "--nodelist=n7,n4" in SlurmCluster().words(launch, name="x", on=on)
    # Of nodes that are not known yet Slurm chooses, beside those that are.
    words = SlurmCluster().words(launch, name="x", on=chosen(launch, ("n7",)))
    assert {"--nodes=2", "--nodelist=n7"} <= set(words)


def test_preflight_names_the_nodes_in_the_order_in_which_launches_take_them(tmp_path: Path) -> None:
    """Pairs of nodes are measured by places in that order, and told by these names."""
    keep_nodes(tmp_path / KEPT, ["n1"])
    keep_nodes(tmp_path / KEPT, ["n0", "n1", "n2"])
    root = tmp_path / "preflight/nodes" / NODES
    for index, name in enumerate(("n0", "n1", "n2")):
        (root / name).mkdir(parents=True)
        append_record(root / name / NODE_JSONL, NodeState(node=name, index=index))
        write_facts(root / name, {})
    (root.parent / LAUNCH_JSON).write_text("{}")
    facts = _gathered(tmp_path, root.parent, helpers.Place(kind="slurm").launcher(tmp_path))
    assert facts[NODE_NAMES].value == "n1, n0, n2"
    assert kept_nodes(tmp_path / KEPT) == ("n1", "n0", "n2")


def test_the_documents_of_all_nodes_become_those_of_the_launch(tmp_path: Path) -> None:
    """In the order of the nodes, which is not that of their names; GPUs are counted on."""
    xid = "NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus."
    for index, (name, problem) in enumerate((("n7", ""), ("n4", "no nvidia-smi"))):
        (folder := tmp_path / NODES / name).mkdir(parents=True)
        append_record(folder / NODE_JSONL, NodeState(node=name, index=index))
        (folder / "console.log").write_text(f"of {name}")
        gpus = [{"index": 0, "uuid": f"{name}a"}, {"index": 1, "uuid": f"{name}b"}]
        devices = {"problem": problem, "driver": "580", "gpus": gpus}
        (folder / "devices_before.json").write_text(json.dumps(devices))
        kernel = {"source": "dmesg --raw", "problem": "", "lost": bool(index)}
        kernel |= {"left_out": 1, "lines": [xid]}
        (folder / "kernel_log.json").write_text(json.dumps(kernel))
        load = {"problem": "", "cpus": 2, "total_s": 20.0, "others_s": 5.0 * index, "wall_s": index}
        (folder / "load.json").write_text(json.dumps(load))
        columns = GPU_SAMPLES.columns
        rows = [",".join(str(place) for _ in columns) for place in (0, 1)]
        (folder / "gpu_samples.csv").write_text("\n".join([",".join(columns), *rows, "torn"]))
    lines, load_of_all = files.gather(tmp_path)
    assert [line.node for line in lines] == ["n7", "n4"]
    assert load_of_all is not None and (load_of_all.cpus, load_of_all.others) == (4, 0.125)
    assert (tmp_path / "console.log").read_text() == "of n7\nof n4\n"
    told = json.loads((tmp_path / "devices_before.json").read_text())
    assert (told["problem"], told["driver"]) == ("n4: no nvidia-smi", "580")
    found = [(gpu["index"], gpu["node"], gpu["uuid"]) for gpu in told["gpus"]]
    assert found == [(0, "n7", "n7a"), (1, "n7", "n7b"), (2, "n4", "n4a"), (3, "n4", "n4b")]
    told = json.loads((tmp_path / "kernel_log.json").read_text())
    assert (told["lost"], told["left_out"]) == (True, 2)
    assert told["lines"] == [xid, xid]
    place = GPU_SAMPLES.columns.index("index")
    samples = (tmp_path / "gpu_samples.csv").read_text().splitlines()[1:]
    assert [row.split(",")[place] for row in samples] == ["0", "1", "2", "3"]
    assert not (tmp_path / "devices_after.json").exists()
