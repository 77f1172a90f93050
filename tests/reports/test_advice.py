"""What a page says to type next: a fact of the run, and never the failure once more by accident."""

from __future__ import annotations

import shlex

from reports.causes import Cause
from reports.view import following, permit_of
from runbook.config.load import load_profile
from runbook.engine.derive import render
from runbook.records import Outcome, Reason, RunRecord, Verdict
from tests.reports.samples import go
from tests.reports.test_causes import nan, of, phase, row

CPU = load_profile("cpu").model_dump(mode="json")
OPTIONS = {"profile": "/home/me/mine.yaml", "out": "/runs"}


def only(*phases: object, **fields: object) -> Cause:
    (cause,) = of(*phases, **{"profile_document": CPU, **fields})  # type: ignore[arg-type]
    return cause


def test_what_was_set_by_hand_is_left_out_of_the_next_command_and_kept_in_the_other() -> None:
    cause = only(phase("baseline", nan(4)), settings={"train.lr": "1e6"})
    assert cause.rerun == "runbook run --phase baseline --profile cpu"
    line = "runbook run --phase baseline --profile cpu --set train.lr=1e6 --aa"
    check = row("baseline.x", Outcome.FAIL, Reason.CRASH, "so", rerun=line, follows="baseline/run1")
    record = phase("baseline", nan(4))
    cause = only(
        record.model_copy(update={"checks": (check, *record.checks)}), settings={"train.lr": "1e6"}
    )
    assert cause.advice.command == "runbook run --phase baseline --profile cpu --aa"
    assert cause.advice.likely == ("train.lr=1e6 was set by hand (--set).",)
    assert cause.rerun == line and cause.steps[0].startswith("if it comes back: ")


def test_what_the_shell_set_is_taken_out_of_the_shell() -> None:
    name = "NSA_PREFILL_BATCHED"
    cause = only(phase("baseline", nan(4)), settings={name: "0"}, sources={name: "shell"})
    told = f"env -u {name} runbook run --phase baseline --profile cpu"
    assert cause.advice.command == told


def on_a_cpu(**fields: object) -> RunRecord:
    return go().model_copy(
        update={"profile": "cpu", "profile_document": CPU, "options": OPTIONS, **fields}
    )


def test_a_go_of_a_cpu_says_what_it_is_not_and_how_production_starts() -> None:
    permit = permit_of(on_a_cpu(settings={"NSA_DDP_BUCKET_MB": "1"}))
    assert permit.says == (
        "The code works on this CPU. Speed was not judged. This approves no run on GPUs."
    )
    assert permit.valid_for == "commit 840303b, this machine, profile cpu"
    (step,) = following(on_a_cpu(settings={"NSA_DDP_BUCKET_MB": "1"}), ())
    assert shlex.split(step.command) == [
        *("runbook", "launch", "--profile", "/home/me/mine.yaml"),
        *("--set", "NSA_DDP_BUCKET_MB=1", "--out", "/runs"),
    ]
    assert not permit.qualified
    short = permit_of(on_a_cpu(caveats=("steps x 0.5",)))
    assert short.qualified.startswith("A qualified GO: steps x 0.5. runbook launch ")


def test_a_run_whose_files_had_no_room_goes_on_when_there_is_some() -> None:
    reasons = ("the run's files cannot be written (run.json: No space left on device)",)
    full = on_a_cpu(verdict=Verdict.INCOMPLETE, reasons=reasons)
    (step,) = following(full, ())
    assert step.command == f"runbook run --resume {full.run_id} --out /runs"
    assert step.does == "go on, once there is room for its files"


def test_a_go_of_a_trainer_of_ones_own_and_of_a_launch_print_no_launch() -> None:
    document = {**CPU, "own_trainer": {"name": "theirs"}}
    own = on_a_cpu(profile_document=document, exports={"OMP_NUM_THREADS": "1"})
    (next_one,) = following(own, ())
    assert next_one.command == f"runbook verify /runs/{own.run_id}"
    assert f"next   {next_one.command}" in render(own, "terminal")
    words = "  Start your trainer as you do, with this in its shell:\nexport OMP_NUM_THREADS=1\n"
    assert words in render(own, "terminal")
    launch = on_a_cpu(options={**OPTIONS, "plan": "production"})
    assert following(launch, ()) == ()
    assert permit_of(launch).says == "Every phase of this launch passed its gate."
    scaled = launch.model_copy(update={"caveats": ("steps x 0.02",)})
    assert 'GO</span> <span class="caveat">steps x 0.02</span></h1>' in render(scaled, "html")
