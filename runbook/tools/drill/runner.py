"""Runs a list of faults, one after the other or a few at a time."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from runbook.files import make_private_dir
from runbook.launch import StopRequest
from runbook.tools.drill.faults import Fault
from runbook.tools.drill.scene import DrillRow, judge_scene
from runbook.tools.drill.scenes import play


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """All rows of a drill."""

    rows: tuple[DrillRow, ...]
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Every injected fault was noticed as promised, and none was left out."""
        return bool(self.rows) and not self.interrupted and all(row.ok for row in self.rows)

    def summary(self) -> dict[str, Any]:
        """The figures: how many, how often right, how much later than the threshold."""
        timed = [row for row in self.rows if row.seconds is not None]
        over = sorted((row.seconds or 0.0) - row.threshold_s for row in timed)
        culprits = [row for row in self.rows if row.limit_s is not None]
        return {
            "faults": len(self.rows),
            "kinds": len({row.fault for row in self.rows}),
            "good": sum(row.ok for row in self.rows),
            "detected": sum(row.detected for row in self.rows),
            "culprit_right": sum(row.culprit_right for row in culprits),
            "culprit_of": len(culprits),
            "median_over_threshold_s": round(statistics.median(over), 3) if over else None,
            "max_over_threshold_s": round(over[-1], 3) if over else None,
            "orphans": sum(row.orphans for row in self.rows),
            "rows_lost": sum(row.rows_lost for row in self.rows),
        }


def run_drill(
    faults: Sequence[Fault],
    out: Path,
    *,
    repeat: int = 1,
    jobs: int = 1,
    keep: bool = False,
    stop: StopRequest | None = None,
    on_row: Callable[[DrillRow], None] = lambda _row: None,
) -> DrillReport:
    """Inject every fault `repeat` times in folders below `out` (which must not exist).

    Folders of injections that went as promised are deleted unless `keep`. `jobs` at a time makes
    a drill shorter and its times longer. Raises `FileExistsError`, and `OSError` if the disk
    refuses.
    """
    make_private_dir(out)
    stop = stop or StopRequest()

    def one(index: int, fault: Fault) -> DrillRow | None:
        if stop.requested:
            return None
        if fault.spread and index > len(faults):
            moved = Random(index).randrange(fault.spread)  # noqa: S311 - repeatable, no secret
            fault = replace(fault, step=fault.step + moved)
        root = out / f"{index:03d}-{fault.name}"
        make_private_dir(root)
        options = {"stop": stop} if fault.scene in ("launch", "override") else {}
        scene = play(fault, root, **options)
        if stop.requested:
            return None
        row = judge_scene(fault, scene)
        if row.ok and not keep:
            shutil.rmtree(root)
        on_row(row)
        return row

    plan = list(enumerate([fault for _ in range(repeat) for fault in faults], start=1))
    if jobs == 1:
        rows = [one(index, fault) for index, fault in plan]
    else:
        rows = _at_a_time(plan, one, jobs)
    done = tuple(row for row in rows if row is not None)
    return DrillReport(rows=done, interrupted=len(done) < len(plan))


def _at_a_time(
    plan: Sequence[tuple[int, Fault]],
    one: Callable[[int, Fault], DrillRow | None],
    jobs: int,
) -> list[DrillRow | None]:
    # A launch lives as long as the thread that started it: the pool outlives all of them.
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures: list[Future[DrillRow | None]] = [pool.submit(one, *item) for item in plan]
        return [future.result() for future in futures]
