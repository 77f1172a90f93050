"""`runbook gpu-acceptance`: one command on one GPU, and few files that come back."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.cli._parser import SIGNALS, Command, CommandParser, number_type, path_type
from runbook.console import Console
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit, UsageError

if TYPE_CHECKING:
    from runbook.tools.acceptance.stages import Place, Stage
    from runbook.tools.acceptance.state import State

_STAND_IN_DEVICE = "STAND-IN-no-GPU"
_ASK_S = 30.0


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--stage", action="append", default=[], metavar="LIST",
        help="only these, comma-separated (default: all that are not finished)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=path_type, default=Path("acceptance"), metavar="DIR",
        help="gets a folder named after the device, with six files (default: acceptance)",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=path_type, default=Path(DEFAULT_OUT) / "acceptance", metavar="DIR",
        help=f"everything while it runs (default: {DEFAULT_OUT}/acceptance); the next call goes on "
        "from here, or from what was handed over if this is gone",
    )  # fmt: skip
    parser.add_argument(
        "--profile",
        default="auto",
        metavar="auto|NAME|FILE",
        help="as for `runbook run` (default: auto)",
    )
    parser.add_argument(
        "--until-s", type=number_type(above=0), metavar="S",
        help="end this call by itself within S seconds (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--again", action="store_true", help="repeat stages that have ended; their files are kept"
    )
    parser.add_argument(
        "--stand-in", action="store_true",
        help="a rehearsal on the CPU with small shapes, marked as such in all that it writes",
    )  # fmt: skip
    parser.add_argument(
        "--stages",
        type=path_type,
        metavar="FILE",
        help="another list of stages, of the same form (default: the shipped one)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print stages, commands and budgets; start nothing"
    )


def _accept(args: argparse.Namespace, console: Console) -> int:
    from runbook.launch import StopRequest, stop_on_signals
    from runbook.tools.acceptance.runner import Runner, only_one
    from runbook.tools.acceptance.stages import load_stages, select_stages

    stages = load_stages(args.stages)
    asked = select_stages(args.stage, stages)
    if args.dry_run:
        return _show_plan(args, console, asked)
    device = _device(args)
    place = _place(args)
    out, work = (args.out / device).resolve(), (args.work / device).resolve()
    _check_folders(out, work)
    state = _state(work, out, device, place, stages, console)
    with only_one(work), stop_on_signals(StopRequest()) as stop:
        runner = Runner(
            stages=stages,
            place=place,
            state=state,
            work=work,
            out=out,
            again=_again(args),
            tell=console.progress,
            stop=stop,
            until_s=args.until_s,
        )
        if args.again:
            for stage in asked:
                runner.set_aside(stage)
        state = runner.run(asked)
    _show(console, state, stages, out, args, runner.problem)
    if stop.requested:
        return SIGNALS[stop.requested]
    code = state.exit_code([stage.name for stage in asked])
    # What nobody can carry away is not done, whatever the stages say.
    return max(code, ProgramExit.INCOMPLETE) if runner.problem and code != 1 else code


def _device(args: argparse.Namespace) -> str:
    """The folder's name: that of the first GPU, with their number if there are several."""
    from runbook.process.start import run_tool

    if args.stand_in:
        return _STAND_IN_DEVICE
    told = run_tool(("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"), timeout_s=_ASK_S)
    names = [line.strip() for line in told.stdout.splitlines() if line.strip()]
    if not told.ok or not names:
        raise UsageError(
            f"no GPU: {told.problem or 'nvidia-smi lists none'}",
            hint="--stand-in rehearses every stage on the CPU, and marks all output so",
        )
    count = f"{len(names)}x-" if len(names) > 1 else ""
    return count + (re.sub(r"[^A-Za-z0-9.]+", "-", names[0]).strip("-") or "GPU")


def _place(args: argparse.Namespace) -> Place:
    from runbook.config import is_profile_file, load_profile
    from runbook.machine.detect import detect_profile
    from runbook.tools.acceptance.stages import Place, find_checkout

    name = args.profile
    if name == "auto":
        name = "cpu" if args.stand_in else detect_profile()[0]
    if is_profile_file(name):
        name = str(Path(name).resolve())
    profile = load_profile(name)
    if profile.has_gpu is args.stand_in:
        kind = "a GPU" if profile.has_gpu else "a CPU"
        raise UsageError(f"--profile {name} is for {kind}, --stand-in is for a CPU only")
    return Place(checkout=find_checkout(), profile=name, stand_in=args.stand_in)


def _check_folders(out: Path, work: Path) -> None:
    if out == work or out.is_relative_to(work) or work.is_relative_to(out):
        raise UsageError(f"--out {out} and --work {work} lie in each other: name another one")
    for flag, folder in (("--out", out), ("--work", work)):
        probe = folder / ".can-be-written"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_text("x", encoding="utf-8")
            probe.unlink()
        except OSError as error:
            text = f"{flag} {folder}: cannot be written: {error.strerror or error}"
            raise UsageError(text, hint="name a folder that can be") from error


def _state(
    work: Path, out: Path, device: str, place: Place, stages: Sequence[Stage], console: Console
) -> State:
    """Where an earlier call ended, or the beginning."""
    from runbook.tools.acceptance.handover import take_up
    from runbook.tools.acceptance.state import STATE_FILE, StageState, State

    if not (work / STATE_FILE).is_file() and take_up(out, work):
        console.progress(f"going on from what was handed over in {out}")
    state = State.read(work)
    if state is None:
        return State.new(device, place.profile, stages, stand_in=place.stand_in)
    missing = {stage.name: StageState() for stage in stages if stage.name not in state.stages}
    return state.model_copy(update={"stages": state.stages | missing, "profile": place.profile})


def _again(args: argparse.Namespace) -> str:
    words = ["runbook", "gpu-acceptance", "--out", str(args.out.absolute())]
    words += ["--work", str(args.work.absolute())]
    words += ["--stand-in"] if args.stand_in else []
    words += ["--profile", args.profile] if args.profile != "auto" else []
    words += ["--stages", str(args.stages.absolute())] if args.stages else []
    words += ["--until-s", f"{args.until_s:g}"] if args.until_s else []
    return shlex.join(words)


def _show_plan(args: argparse.Namespace, console: Console, asked: Sequence[Stage]) -> int:
    from runbook.tools.acceptance.handover import STAND_IN
    from runbook.tools.acceptance.stages import Place, find_checkout

    place = Place(
        checkout=find_checkout(),
        profile="cpu" if args.stand_in and args.profile == "auto" else args.profile,
        stand_in=args.stand_in,
    )
    rows: list[dict[str, Any]] = []
    for stage in asked:
        values = place.values(args.work / "DEVICE" / stage.name, stage.budget_s)
        lines = [shlex.join(c.words(values, stand_in=args.stand_in)) for c in stage.commands]
        missing = place.missing(stage)
        rows.append(
            {"stage": stage.name, "title": stage.title, "budget_s": stage.budget_s}
            | {"parts": stage.parts, "needs": list(stage.needs), "missing": missing}
            | {"commands": lines}
        )
    total = sum(stage.budget_s * stage.parts for stage in asked)
    if args.json:
        document = {"schema_version": 1, "stand_in": args.stand_in, "total_s": total}
        console.json_document({**document, "stages": rows})
        return 0
    console.result("# dry run: nothing is started")
    if args.stand_in:
        console.result(f"# {STAND_IN}")
    for row in rows:
        parts = f"{row['parts']} x " if row["parts"] != 1 else ""
        console.result("", f"# {row['stage']}: {row['title']}")
        console.result(f"#   at most {parts}{row['budget_s']:g} s; needs {', '.join(row['needs'])}")
        for text in row["missing"]:
            console.result(f"#   NOT RUN here: {text}")
        console.result(*row["commands"])
    console.result("", f"# together at most {total:g} s = {total / 60:.0f} min")
    return 0


def _show(
    console: Console,
    state: State,
    stages: Sequence[Stage],
    out: Path,
    args: argparse.Namespace,
    problem: str,
) -> None:
    from runbook.tools.acceptance.handover import STAND_IN

    if args.json:
        document = {**state.model_dump(mode="json"), "folder": str(out), "problem": problem}
        console.json_document({**document, "continue": _again(args)})
        return
    if state.stand_in:
        console.result(STAND_IN)
    cells = [
        (stage.name, str(one.status), f"{one.seconds:.0f}", one.reason.replace("\n", " "))
        for stage in stages
        for one in (state.stages[stage.name],)
    ]
    console.table(("STAGE", "STATUS", "SECONDS", "WHAT IT SAYS"), cells)
    if any(not state.stages[stage.name].status.finished for stage in stages):
        console.result(f"go on   {_again(args)}")
    console.result(f"folder  {out}")
    if problem:
        console.result(f"NOT HANDED OVER: {problem}")


GPU_ACCEPTANCE = Command(
    name="gpu-acceptance",
    help="run all that waits for a GPU, in stages of minutes; one small folder comes back",
    description="""\
Run on one GPU what only a GPU can answer: what the machine is, what its hardware can do, the
tests that need it, one whole run with its verdict, attention beside dense kernels, the choices
that change a step's speed, and a real hang. Each stage has its time and goes on where it ended;
whatever ends the call, what there is so far lies in the folder.""",
    examples="""\
  runbook gpu-acceptance --dry-run                   stages, commands and budgets
  runbook gpu-acceptance                             all that is not finished
  runbook gpu-acceptance --stage device,tests --until-s 570 --out /tmp/out
  runbook gpu-acceptance --stand-in                  a rehearsal without a GPU""",
    exits="0 all stages passed, 1 one failed, 2 usage or no GPU, 3 one that was asked for is\n"
    "cut off, undecided or not run, 4 those that were asked for passed and others have not run,\n"
    "129 SIGHUP, 130 Ctrl-C, 143 SIGTERM",
    add_arguments=_add_arguments,
    run=_accept,
)
