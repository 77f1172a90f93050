"""The trainer's own loop, in this process."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from nsa.data.packing import open_source
from nsa.data.source import Source
from nsa.launch.output import Heartbeat
from nsa.launch.plan import LaunchPlan
from nsa.launch.process import Termination
from nsa.launch.ranks import Ranks
from nsa.step.engine import Engine
from nsa.train.loop import Loop
from nsa.train.settle import Tables


def made_source(plan: LaunchPlan, ranks: Ranks, dataset: str) -> Source:
    """The data set of this rank, as the plan's config says it."""
    data = plan.config.data.model_copy(update={"dataset": dataset})
    share = replace(plan.share, rank=ranks.rank, world_size=ranks.world_size)
    return open_source(data, share)


def made_loop(
    plan: LaunchPlan,
    ranks: Ranks,
    source: Source,
    run_dir: Path,
    start_step: int = 0,
    *,
    owed: bool = False,
) -> Loop:
    """A loop that writes its records into `run_dir`, without TensorBoard."""
    beat = Heartbeat(rank=ranks.rank, token=secrets.token_hex(8))
    beat.open(run_dir)
    return Loop(
        Engine(plan, ranks),
        source=source,
        tables=Tables(run_dir, rank=ranks.rank, csv=True, aux=True, board=False),
        heartbeat=beat,
        termination=Termination(),
        run_dir=run_dir,
        start_step=start_step,
        owed=owed,
    )
