"""Stage `run`: one whole run of the profile in parts, shortened to fit, ending with its verdict.

    python -m runbook.tools.acceptance.run --out DIR --profile NAME --fit-s S [--left-s S]
        [--phases LIST]

The first part measures a few steps, decides from them what fits, writes profile.yaml and begins
the run; each later one goes on with it. The verdict says what was shortened.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from nsa.contract import TRAINING_CSV
from runbook.config import Profile, Settings, is_profile_file, load_profile
from runbook.config.setup import RunOptions, Setup
from runbook.engine import resume_run, run_plan
from runbook.files import write_atomic
from runbook.launch import StopRequest, run_launch, set_aside, stop_on_signals
from runbook.launch.observer import Observer
from runbook.read import read_training_csv
from runbook.records import Launch, LaunchResult, Outcome, PhaseRecord, RunRecord, Verdict
from runbook.registry import report_names, select
from runbook.stats import step_times
from runbook.tools.acceptance.program import Program, markdown_table
from runbook.tools.acceptance.shorten import Pace, Shortened, shorten
from runbook.tools.acceptance.stages import TO_BE_CONTINUED

_MODULE = "runbook.tools.acceptance.run"
_PROBE_STEPS = 24
_PROBE_CUT = 8
_PROBE_TIMEOUT_S = 180.0
_PACE_JSON = "pace.json"
_PROFILE_YAML = "profile.yaml"
# What the longest part of ending takes: reports, digests, the manifest.
_ENDING_S = 10.0
_EXIT = {Verdict.GO: 0, Verdict.NO_GO: 1, Verdict.INCOMPLETE: 3, Verdict.PARTIAL: 3}
_BAD = frozenset(one for one in Outcome if one.rank < Outcome.SKIPPED.rank)


class Lines(Observer):
    """Progress as lines: the last one is shown while the stage runs."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """A line for each launch."""
        again = f", attempt {attempt}" if attempt > 1 else ""
        self._program.say(f"{launch.phase}/{launch.name}: {launch.steps} steps{again}")

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """How it ended."""
        text = f"{launch.phase}/{launch.name}: {result.status} after {result.duration_s:.0f} s"
        self._program.say(f"{text} {result.cause}".rstrip())

    def phase_finished(self, record: PhaseRecord) -> None:
        """Its outcome."""
        self._program.say(f"{record.name}: {record.outcome}")

    def note(self, text: str) -> None:
        """As it is."""
        self._program.say(text)


def probe_launch(profile: Profile) -> Launch:
    """A few steps of what the baseline runs."""
    config = profile.config if "/" in profile.config else f"configs/{profile.config}"
    return Launch(
        name="probe",
        phase="probe",
        kind="trainer",
        argv=(
            *("torchrun", f"--nproc_per_node={profile.ranks}", "-m", profile.trainer),
            *("--config", config, "--dataset", "synthetic", "--ddp", "1"),
            *("--steps", str(_PROBE_STEPS)),
        ),
        env={name: one.value for name, one in profile.env.items()},
        run_dir="probe",
        nproc=profile.ranks,
        steps=_PROBE_STEPS,
        timeout_s=_PROBE_TIMEOUT_S,
        config=config,
        config_overrides=profile.phases["baseline"].config_overrides,
    )


def measured_pace(program: Program, profile: Profile, stop: StopRequest) -> Pace | None:
    """The pace of this device, from a launch of a few steps; None if that did not end well."""
    out: Path = program.args.out
    kept = out / _PACE_JSON
    if kept.is_file():
        return Pace(**json.loads(kept.read_text("utf-8")))
    if (out / "probe").exists():
        set_aside(out / "probe", "unfinished")
    launch = probe_launch(profile)
    result = run_launch(launch, out, observer=Lines(program), stop=stop, retry=False)
    if not result.ok:
        return None
    log = read_training_csv(out / "probe" / TRAINING_CSV, relative_to=out)
    times = step_times(log)
    pace = Pace(
        step_s=float(times[_PROBE_CUT:].mean()),
        start_s=max(0.0, result.duration_s - float(times[_PROBE_CUT:].sum())),
    )
    write_atomic(kept, json.dumps(vars(pace)) + "\n")
    return pace


def fitted(program: Program, profile: Profile, pace: Pace, phases: str) -> Shortened:
    """The profile that fits, written to profile.yaml."""
    names = [name.strip() for name in phases.split(",") if name.strip()]
    running = tuple(select(phases or "all"))

    def plan(candidate: Profile) -> list[Launch]:
        setup = Setup(
            options=RunOptions(profile=profile.name),
            profile=candidate,
            settings=Settings(),
            phases=running,
        )
        return [launch for phase in running for launch in phase.plan(setup.context({}))]

    found = shorten(
        profile,
        load_profile("cpu"),
        phases=names,
        pace=pace,
        fit_s=float(program.args.fit_s),
        plan=plan,
    )
    named = program.args.profile
    extends = str(Path(named).resolve()) if is_profile_file(named) else named
    text = yaml.safe_dump(found.document(extends, names), sort_keys=False)
    write_atomic(program.args.out / _PROFILE_YAML, f"# {found.described()}\n{text}")
    return found


def run_part(program: Program) -> RunRecord | None:
    """Begin the run, or go on with it; None if not even a few steps could be measured."""
    out, runs = program.args.out, program.args.out / "runs"
    begun = sorted(runs.glob("*/events.jsonl"))
    observer = Lines(program)
    if begun:
        folder = begun[-1].parent
        record = _finished(folder)
        if record is not None:
            return record
        return resume_run(folder, observer=observer, until_s=_until_s(program))
    profile = load_profile(program.args.profile)
    with stop_on_signals(StopRequest()) as stop:
        pace = measured_pace(program, profile, stop)
    if pace is None:
        return None
    cut = fitted(program, profile, pace, program.args.phases)
    program.say(f"step {pace.step_s:.3f} s, start {pace.start_s:.0f} s; {cut.described()}")
    options = RunOptions(
        phases=program.args.phases or "all",
        profile=str((out / _PROFILE_YAML).resolve()),
        out=runs,
        command=shlex.join(["python3", "-m", _MODULE, *sys.argv[1:]]),
        formats=report_names(),
        # The machine is what it is: everything is measured, and the verdict says what is wrong.
        keep_going=True,
    )
    return run_plan(options, observer=observer, until_s=_until_s(program))


def _until_s(program: Program) -> float:
    return max(1.0, program.left_s - _ENDING_S)


def _finished(folder: Path) -> RunRecord | None:
    path = folder / "run.json"
    if not path.is_file():
        return None
    record = RunRecord.model_validate_json(path.read_bytes())
    return record if record.finished_at is not None and not record.interrupted else None


def report(program: Program, record: RunRecord) -> None:
    """The verdict, what was cut, each phase, and each required check that did not pass."""
    out: Path = program.args.out
    cut = (out / _PROFILE_YAML).read_text("utf-8").partition("\n")[0].removeprefix("# ")
    phases = [
        (p.name, p.outcome, f"{p.duration_s:.0f}", len([e for e in p.launches if e.result.ok]))
        for p in record.phases
    ]
    bad = [c for c in record.checks() if c.required and c.outcome in _BAD]
    checks = [(check.id, check.outcome, check.reason) for check in bad]
    text = record.headline
    table = (
        f"{text}\n\n{cut}\n\n"
        + markdown_table(("phase", "outcome", "seconds", "launches"), phases)
        + ("\n" + markdown_table(("required check", "outcome", "reason"), checks) if bad else "")
    )
    document = {
        "verdict": record.verdict,
        "headline": record.headline,
        "reasons": list(record.reasons),
        "interrupted": record.interrupted,
        "cut": cut,
        "run": record.run_id,
        "phases": {phase.name: str(phase.outcome) for phase in record.phases},
    }
    program.write(text, table, document)


def main(argv: Sequence[str]) -> int:
    """0 GO, 1 NO-GO, 3 INCOMPLETE, 75 to be continued."""
    program = Program(__doc__)
    program.parser.add_argument("--fit-s", type=float, required=True, metavar="S")
    program.parser.add_argument("--phases", default="", metavar="LIST")
    program.parse(argv)
    record = run_part(program)
    if record is None:
        text = "a launch of a few steps did not end well: see probe/"
        program.write(text, text, {"verdict": None})
        return 1
    report(program, record)
    if record.interrupted:
        return TO_BE_CONTINUED
    return _EXIT[record.verdict]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
