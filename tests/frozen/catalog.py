"""Which runs are kept: what is special in each, the exact commands, and how each command ends.

Of `go` and `launch` the paths of other people's processes were replaced by some of the same length,
and every digest that follows from them with it. None is of a GPU: only reports of such runs are
left, no folder of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.examples.__main__ import EXAMPLES

_SLOW = next(example for example in EXAMPLES if example.name == "slow-config")
_PLAIN = Path(__file__).parents[1] / "own/trainers/plain_ddp.py"


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """One run. `commands` are typed in an empty folder; each ends with its code of `exits`.

    `profile` is written there as `mine.yaml`. `beside` names the entry in whose folder it is made,
    after it. The first command is killed as soon as its run has the file `killed_at`. `cluster`:
    Slurm runs meanwhile.
    """

    name: str
    what: str
    commands: tuple[str, ...]
    exits: tuple[int, ...]
    profile: dict[str, Any] = field(default_factory=dict)
    beside: str = ""
    killed_at: str = ""
    cluster: bool = False


def _mine(name: str, **changes: Any) -> dict[str, Any]:
    return {"extends": "cpu", "name": name, "title": f"2 gloo ranks on CPU, {name}", **changes}


FROZEN = (
    Frozen(
        name="go",
        what="all phases of a healthy machine",
        commands=("runbook run --profile cpu",),
        exits=(0,),
    ),
    Frozen(
        name="launch",
        what="the production plan behind that GO",
        commands=("runbook launch --profile cpu --steps-scale 0.02",),
        exits=(0,),
        beside="go",
    ),
    Frozen(
        name="partial",
        what="two phases of nine",
        commands=("runbook run --profile cpu --phase baseline,sdpa_audit",),
        exits=(4,),
    ),
    Frozen(
        name="resumed",
        what="the harness was killed in the second launch; the run went on, with a phase more",
        commands=(
            "runbook run --profile cpu --phase baseline",
            "runbook run --resume {run}",
            "runbook run --resume {run} --phase sdpa_audit",
        ),
        exits=(-9, 4, 4),
        killed_at="baseline/run2/training.csv",
    ),
    Frozen(
        name="crash",
        what="rank 1 raises at step 20",
        commands=("runbook run --profile ./mine.yaml --phase baseline",),
        exits=(1,),
        profile=_mine("crash", trainer="tests.frozen.crashing"),
    ),
    Frozen(
        name="repeated",
        what="the same, and its phase run again, without a crash",
        commands=(
            "runbook run --profile ./mine.yaml --phase baseline",
            "runbook run --resume {run}",
        ),
        exits=(1, 4),
        profile=_mine("crash", trainer="tests.frozen.crashing"),
    ),
    Frozen(
        name="nan",
        what="a loss that is not finite",
        commands=("runbook run --profile cpu --phase baseline --set train.lr=1e6",),
        exits=(1,),
    ),
    Frozen(
        name="hang",
        what="rank 1 never comes back from the backward pass of step 20",
        commands=("runbook run --profile ./mine.yaml --phase baseline",),
        exits=(1,),
        profile=_mine("hang", trainer="benchmarks.examples.hanging"),
    ),
    Frozen(
        name="leak",
        what="rank 1 keeps half a MiB more in every step",
        commands=("runbook run --profile ./mine.yaml --phase long_run",),
        exits=(1,),
        profile=_mine("leak", trainer="benchmarks.examples.leaking"),
    ),
    Frozen(
        name="slow",
        what="token by token instead of the whole sequence at once, below a floor that decides",
        commands=(
            "runbook run --profile ./mine.yaml --phase baseline --set NSA_PREFILL_BATCHED=0",
        ),
        exits=(1,),
        profile=_mine(
            "slow",
            required=["baseline.throughput"],
            phases={"baseline": {"timeout_s": 400}},
            **_SLOW.changes,
        ),
    ),
    Frozen(
        name="wrong-hardware",
        what="the profile of two A100s on a machine without a GPU",
        commands=("runbook run --profile a100x2_pcie4",),
        exits=(3,),
    ),
    Frozen(
        name="own-trainer",
        what="a trainer that is not ours",
        commands=(
            "runbook init --profile cpu --ranks 2 --tokens-per-rank 8 --trainer "
            f"'torchrun --nproc_per_node=2 {_PLAIN} --steps 9'",
            "runbook run --profile ./plain_ddp.yaml --phase baseline,long_run",
        ),
        exits=(0, 4),
    ),
    Frozen(
        name="two-nodes",
        what="two nodes of Slurm",
        commands=("runbook run --profile cpu --phase baseline --launcher slurm --nodes 2",),
        exits=(4,),
        cluster=True,
    ),
)
