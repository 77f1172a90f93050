"""Stage `evidence`: real hangs on the real backend, and what the ranks leave of them, as fixtures.

    python -m runbook.tools.acceptance.provoke --out DIR --profile NAME [--left-s S] [--stand-in]

On a GPU a rank falls asleep in a step, and then work on the device never ends, so that NCCL's own
watchdog gives up and dumps its last collectives. Without one two gloo ranks take their place.

A rank alone waits for nobody and keeps no record of its collectives (`nsa/train/flight.py`): of it
the stack, the heartbeats and the silence are wanted, and of NCCL's watchdog its dump.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa.contract import FLIGHTS, HEARTBEATS, STACKDUMPS
from runbook.config import Profile, load_profile
from runbook.files import write_atomic
from runbook.launch import Budgets, StopRequest, run_launch, set_aside, stop_on_signals
from runbook.launch.end.classify import said_by_watchdog
from runbook.launch.incident.nccl_flight import nccl_flight_files, read_nccl_rows
from runbook.launch.observer import Observer
from runbook.process.reaper import carriers
from runbook.read.documents import CONSOLE_LOG, INCIDENT_JSON, RESULT_JSON
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.tools.acceptance.device import anonymous
from runbook.tools.acceptance.program import Program, markdown_table
from runbook.tools.acceptance.stages import TO_BE_CONTINUED, find_checkout
from runbook.tools.drill.scene import injected_at

_TIMEOUT_S = 90.0
_STEP = 6
_STEPS = 4000
# Small, so that the launch is about its collectives; the backend and the device are the real ones.
_SMALL = {"model.n_layers": 2, "train.seq_len": 256}
_BUDGET_S = 5.0
_LONGEST_S = 45.0


@dataclass(frozen=True, kw_only=True)
class Hang:
    """One way to hang. `stall_s` is after how long the harness acts; NCCL's own limit is shorter
    where its dump is wanted."""

    name: str
    title: str
    kind: str
    statuses: tuple[LaunchStatus, ...]
    stall_s: float = _BUDGET_S
    wants_nccl_dump: bool = False
    env: dict[str, str] = field(default_factory=dict)


_ASLEEP = Hang(
    name="asleep",
    title="a rank sleeps in a step",
    kind="sleep",
    statuses=(LaunchStatus.HUNG,),
)
_STUCK = Hang(
    name="nccl_timeout",
    title="work on the device never ends, NCCL's watchdog gives up",
    kind="stuck_stream",
    statuses=(LaunchStatus.CRASHED, LaunchStatus.HUNG),
    stall_s=40.0,
    wants_nccl_dump=True,
    env={"NSA_PG_TIMEOUT_MIN": "0.15"},
)
_EXTRA = Hang(
    name="extra_collective",
    title="one rank makes a collective that the other does not",
    kind="extra_collective",
    statuses=(LaunchStatus.CRASHED, LaunchStatus.HUNG),
)
ON_GPU, STAND_IN = (_ASLEEP, _STUCK), (_ASLEEP, _EXTRA)


def hang_launch(hang: Hang, profile: Profile) -> Launch:
    """The trainer with this hang in its last rank."""
    config = profile.config if "/" in profile.config else f"configs/{profile.config}"
    inject = ("-m", "nsa.inject", hang.kind, str(profile.ranks - 1), str(_STEP), "--")
    return Launch(
        name=hang.name,
        phase="evidence",
        kind="trainer",
        argv=(
            *("torchrun", f"--nproc_per_node={profile.ranks}", *inject, "--config", config),
            *("--dataset", "synthetic", "--ddp", "1", "--steps", str(_STEPS)),
        ),
        env={name: one.value for name, one in profile.env.items()} | hang.env,
        run_dir=hang.name,
        nproc=profile.ranks,
        steps=_STEPS,
        timeout_s=_TIMEOUT_S,
        config=config,
        config_overrides={**profile.phases["baseline"].config_overrides, **_SMALL},
    )


def provoke(hang: Hang, profile: Profile, root: Path, stop: StopRequest) -> LaunchResult:
    """Run it to its end; what an earlier part did is not repeated."""
    kept = root / hang.name / RESULT_JSON
    if kept.is_file():
        return LaunchResult.model_validate_json(kept.read_bytes())
    if (root / hang.name).exists():
        set_aside(root / hang.name, "unfinished")
    budgets = Budgets(step_s=hang.stall_s, data_s=hang.stall_s, init_s=60, first_step_s=60)
    return run_launch(
        hang_launch(hang, profile),
        root,
        observer=Observer(),
        stop=stop,
        budgets=budgets,
        retry=False,
    )


def flight_rows(folder: Path) -> dict[str, int]:
    """How many collectives each flight record of a launch holds; a damaged one holds none."""
    found = {}
    for path in FLIGHTS.found_in(folder).values():
        try:
            found[path.name] = len(json.loads(path.read_bytes()).get("entries", []))
        except (ValueError, AttributeError):
            found[path.name] = 0
    for path in nccl_flight_files(folder).values():
        found[path.name] = len(read_nccl_rows(path.read_bytes()) or [])
    return found


def judge(hang: Hang, result: LaunchResult, folder: Path, *, ranks: int) -> list[str]:
    """What is missing of what such a hang of so many ranks has to leave."""
    stacks = [path for path in folder.glob(STACKDUMPS.glob()) if path.stat().st_size]
    beats = HEARTBEATS.found_in(folder)
    flights = flight_rows(folder)
    dumps = [name for name, rows in flights.items() if rows and name in _nccl_names(folder)]
    own = [name for name, rows in flights.items() if rows and name not in _nccl_names(folder)]
    wanted = ", ".join(str(status) for status in hang.statuses)
    found = {
        f"ended as {result.status}, wanted {wanted}": result.status not in hang.statuses,
        "the hang was never injected": injected_at(folder) is None,
        "no stack dump": not stacks and not hang.wants_nccl_dump,
        "no heartbeat of every rank": len(beats) < ranks,
        "no silence in the cause": (
            result.status is LaunchStatus.HUNG and "silent for" not in result.cause
        ),
        "no flight record with a collective": not (own or hang.wants_nccl_dump or ranks == 1),
        "no dump of NCCL's watchdog that can be read": hang.wants_nccl_dump and not dumps,
        "no word of NCCL's watchdog in the cause": (
            hang.wants_nccl_dump and not said_by_watchdog([result.cause], None)
        ),
        "processes were left alive": bool(result.run_token and carriers(result.run_token)),
    }
    return [text for text, wrong in found.items() if wrong]


def _nccl_names(folder: Path) -> set[str]:
    return {path.name for path in nccl_flight_files(folder).values()}


def keep_fixtures(folder: Path, target: Path) -> list[str]:
    """Copy what the ranks left, without this machine's names and paths; returns the names."""
    target.mkdir(parents=True, exist_ok=True)
    names = []
    for path in sorted(folder.iterdir()):
        wanted = STACKDUMPS.rank_of(path.name), FLIGHTS.rank_of(path.name)
        if path.is_file() and (
            any(rank is not None for rank in wanted)
            or path.name in (CONSOLE_LOG, INCIDENT_JSON, RESULT_JSON)
        ):
            write_atomic(target / path.name, _without_paths(path.read_text("utf-8", "replace")))
            names.append(path.name)
    for path in nccl_flight_files(folder).values():
        rows = read_nccl_rows(path.read_bytes())
        write_atomic(target / f"{path.name}.json", json.dumps(rows, indent=1) + "\n")
        names.append(f"{path.name}.json")
    return names


def _without_paths(text: str) -> str:
    checkout = find_checkout()
    for place, name in ((checkout, "CHECKOUT"), (Path(sys.prefix), "PREFIX"), (Path.home(), "~")):
        if place is not None and len(str(place)) > 1:
            text = re.sub(rf"{re.escape(str(place))}(?=[/\"'\s:]|$)", name, text)
    return anonymous(text)


def main(argv: Sequence[str]) -> int:
    """0 every hang left what it has to, 1 one did not, 75 out of time."""
    program = Program(__doc__)
    args = program.parse(argv)
    profile = load_profile(args.profile)
    rows: list[dict[str, object]] = []
    with stop_on_signals(StopRequest()) as stop:
        for hang in STAND_IN if args.stand_in else ON_GPU:
            done = (args.out / hang.name / RESULT_JSON).is_file()
            if not done and (stop.requested or (rows and program.left_s < _LONGEST_S / 2)):
                _write(program, rows)
                return TO_BE_CONTINUED
            program.say(f"{hang.name}: {hang.title}")
            begun = time.monotonic()
            result = provoke(hang, profile, args.out, stop)
            if result.status is LaunchStatus.INTERRUPTED:
                set_aside(args.out / hang.name, "unfinished")
                _write(program, rows)
                return TO_BE_CONTINUED
            folder = args.out / hang.name
            rows.append(
                {
                    "hang": hang.name,
                    "status": str(result.status),
                    "cause": result.cause,
                    "seconds": round(time.monotonic() - begun, 1),
                    "collectives": flight_rows(folder),
                    "fixtures": keep_fixtures(folder, args.out / "fixtures" / hang.name),
                    "problems": judge(hang, result, folder, ranks=profile.ranks),
                }
            )
            _write(program, rows)
    return 1 if any(row["problems"] for row in rows) else 0


def _write(program: Program, rows: Sequence[dict[str, object]]) -> None:
    cells = [
        (row["hang"], row["status"], row["cause"], row["collectives"], row["problems"] or "none")
        for row in rows
    ]
    good = sum(not row["problems"] for row in rows)
    text = f"{good} of {len(rows)} hangs left what they have to"
    header = ("hang", "ended as", "cause", "collectives in its records", "problems")
    program.write(text, markdown_table(header, cells), {"hangs": list(rows)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
