"""Preflight: the wrong machine or checkout is INVALID, a broken trainer FAIL, a doubt a warning."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from phases import preflight
from runbook.config.load import load_profile
from runbook.config.phase import PlanContext
from runbook.records import Check, Outcome, Reason
from tests.phases import answers, builder, spoil
from tests.phases.answers import NOTHING, WHERE, said

WRONG = (Outcome.INVALID, Reason.WRONG_ENVIRONMENT)
OF_GPUS = (
    "cuda", "gpus", "extra_gpus", "gpu_driver", "mig", "gpu_memory", "pcie", "nvlink", "gpu_clean",
)  # fmt: skip


def row(what: str, where: PlanContext = WHERE, **facts: Any) -> Check:
    found = replace(builder.evidence("preflight", where), facts=builder.facts(**facts))
    return builder.row("preflight", what, found, where)


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("branch", {"git_branch": "topic"}),
        ("clean_tree", {"git_dirty": True}),
        ("gpus", {"gpu_count": 1.0}),
        ("gpus", {"gpu_count": 0.0}),
        ("cuda", {"torch_cuda_available": False}),
        ("cuda", {"torch_device_count": 1.0}),
        ("gpu_driver", {"gpu_driver": "570.133.20", "torch_cuda_available": False}),
        ("mig", {"gpu_mig": True}),
        ("gpus", {"gpu_names": "NVIDIA A100 80GB PCIe, Tesla T4"}),
        ("gpu_memory", {"gpu_memory_total_mib": 40_960.0}),
        ("pcie", {"gpu_pcie_gen_max": 3.0}),
        ("pcie", {"gpu_pcie_width": 8.0}),
        ("nvlink", {"gpu_nvlink": True}),
        ("gpu_power", {"gpu_power_limit": 0.94}),
        ("gpu_clean", {"gpu_processes": 1.0}),
        ("gpu_clean", {"gpu_memory_used_mib": 20_000.0}),
        ("disk_free", {"disk_free_gib": 2.0}),
        ("disk_speed", {"disk_write_mib_s": 3.0}),
        ("leftovers", {"processes_leftover": 2.0}),
        ("variables", {"env_problems": "NSA_OPT_FUSE: no such toggle"}),
        ("needs", {"needs_missing": "dataset fineweb_edu: the package datasets is not here"}),
    ],
)
def test_the_wrong_environment_is_invalid(what: str, facts: dict[str, Any]) -> None:
    assert row(what).outcome is Outcome.PASS
    check = row(what, **facts)
    assert said(check) == WRONG and check.remedy and check.rerun


def test_code_that_runs_before_every_launch_is_a_warning_that_names_it() -> None:
    check = row("variables", python_startup="/x/sitecustomize.py")
    assert said(check) == (Outcome.PASS, Reason.WARNING)
    assert "every launch runs /x/sitecustomize.py first" in check.reason


def test_commits_that_were_fetched_and_are_not_here_are_a_warning() -> None:
    check = row("branch", git_behind=2.0)
    assert said(check) == (Outcome.PASS, Reason.WARNING)
    assert "on main, 2 commits behind (as seen)" in check.reason and "git pull" in check.remedy


def test_trainers_of_a_run_that_goes_on_are_a_warning_that_names_them() -> None:
    check = row("leftovers", processes_other_runs=3.0)
    assert said(check) == (Outcome.PASS, Reason.WARNING)
    assert "3 of runs that go on beside: as seen" in check.reason and "by its pid" in check.remedy


def test_a_trainer_that_does_not_import_fails() -> None:
    check = row("trainer_imports", trainer_imports=False)
    assert said(check) == (Outcome.FAIL, Reason.CRASH)


UNKNOWN = (
    "git_sha", "torch_version", "torch_cuda_available", "gpu_count", "gpu_mig", "gpu_driver",
    "gpu_memory_total_mib", "gpu_pcie_gen_max", "gpu_nvlink", "gpu_processes",
)  # fmt: skip


@pytest.mark.parametrize("what", ["sha", "torch", *OF_GPUS])
def test_what_is_not_known_is_incomplete(what: str) -> None:
    assert said(row(what, **dict.fromkeys(UNKNOWN))) == NOTHING


@pytest.mark.parametrize("fact", ["git_sha", "torch_version", "gpu_driver"])
def test_the_demanded_files_have_to_be_there(fact: str) -> None:
    files = {"git_sha": "git_sha.txt", "torch_version": "collect_env.txt"}
    check = row("artifacts", **{fact: None})
    assert said(check) == (Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT)
    assert files.get(fact, "nvidia_smi.xml") in check.reason


def test_a_limit_whose_comparator_is_nulled_loses_no_row_and_decides(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: a100x2_pcie4\nlimits: {disk_free_gib: {comparator: null}}\n", encoding="utf-8"
    )
    where = replace(WHERE, profile=load_profile(str(mine)))
    judged = [
        {check.id: check.outcome for check in builder.judge("preflight", found, there).checks}
        for there in (where, WHERE)
        for found in [builder.evidence("preflight", there)]
    ]
    assert judged[0] == judged[1]
    assert said(row("disk_free", where, disk_free_gib=2.0)) == WRONG


def test_a_profile_without_a_branch_takes_any_and_warns_of_changes() -> None:
    where = builder.context("cpu")
    assert row("branch", where, git_branch="topic").outcome is Outcome.SKIPPED
    assert said(row("clean_tree", where, git_dirty=True)) == (Outcome.PASS, Reason.WARNING)


@pytest.mark.parametrize("what", ["artifacts", "sha", "clean_tree"])
def test_an_installed_package_has_no_commit_which_only_a_branch_forbids(what: str) -> None:
    nothing = {"git_sha": None, "git_dirty": None}
    cpu = row(what, builder.context("cpu"), **nothing)
    assert said(cpu) == (Outcome.PASS, Reason.WARNING) and "commit unknown: " in cpu.reason
    assert row(what, **nothing).outcome is Outcome.INCOMPLETE


def test_a_cpu_has_no_gpu_rows_but_all_of_them_stand_there() -> None:
    for what in OF_GPUS:
        assert said(row(what, builder.context("cpu"))) == (Outcome.SKIPPED, Reason.NEEDS_CUDA)


def test_generation_3_is_right_on_its_own_profile_and_4_is_not() -> None:
    where = builder.context("a100x2_pcie3")
    assert row("pcie", where, gpu_pcie_gen_max=3.0).outcome is Outcome.PASS
    assert said(row("pcie", where, gpu_pcie_gen_max=4.0)) == WRONG


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"torch_cuda": None}, "torch 2.13.0 was built without CUDA"),
        ({"gpu_count": None}, "as seen"),
        ({"gpu_count": 0.0}, "all GPUs are hidden"),
        ({"gpu_count": 0.0, "gpu_installed": 0.0}, "nvidia-smi lists no GPU"),
        ({"gpu_driver": "550.90.07"}, "driver 550.90.07, but CUDA 13.0 of this torch needs 580.65"),
        ({}, "see collect_env.txt"),
    ],
)
def test_why_torch_sees_no_gpu(facts: dict[str, Any], why: str) -> None:
    check = row("cuda", torch_cuda_available=False, **facts)
    assert said(check) == WRONG and why in check.reason
    assert "CUDA_VISIBLE_DEVICES" in check.remedy


@pytest.mark.parametrize(
    ("driver", "cuda", "new_enough"),
    [
        ("535.183.01", "13.0", False),
        ("570.133.20", "13.2", False),
        ("580.65.05", "13.0", False),
        ("580.65.06", "13.0", True),
        ("610.1", "13.0", True),
        ("535.183.01", "12.8", True),
        ("515.43.04", "12.1", False),
        ("535.183.01", None, True),
        ("535.183.01", "99.0", True),
    ],
)
def test_the_driver_is_held_against_the_cuda_that_torch_was_built_for(
    driver: str, cuda: str | None, new_enough: bool
) -> None:
    check = row("gpu_driver", gpu_driver=driver, torch_cuda=cuda, torch_cuda_available=False)
    assert said(check) == ((Outcome.PASS, Reason.OK) if new_enough else WRONG)
    assert new_enough or "update the driver" in check.remedy


def test_an_old_driver_with_which_torch_sees_the_gpus_is_a_warning() -> None:
    check = row("gpu_driver", gpu_driver="535.183.01")
    assert said(check) == (Outcome.PASS, Reason.WARNING) and "all the same" in check.reason


def test_more_visible_gpus_than_the_profile_uses_are_a_warning() -> None:
    check = row("extra_gpus", gpu_count=8.0)
    assert said(check) == (Outcome.PASS, Reason.WARNING) and "8 GPUs are visible" in check.reason
    assert "CUDA_VISIBLE_DEVICES=0,1" in check.remedy


def test_a_limit_of_the_clocks_that_somebody_set_is_told_and_no_fault() -> None:
    found = builder.evidence("preflight", WHERE)
    caps = replace(found.facts["gpu.count"], name="gpu.caps", value="GPU 0: power cap")
    known = replace(found, facts={**found.facts, "gpu.caps": caps})
    check = builder.row("preflight", "gpu_clean", known, WHERE)
    assert said(check) == (Outcome.PASS, Reason.OK) and "GPU 0: power cap" in check.reason


def test_an_idle_link_that_trained_down_is_no_fault() -> None:
    found = builder.evidence("preflight", WHERE)
    current = replace(found.facts["gpu.pcie_gen_max"], name="gpu.pcie_gen", value=1.0)
    known = replace(found, facts={**found.facts, "gpu.pcie_gen": current})
    assert builder.row("preflight", "pcie", known, WHERE).outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("gpu.ecc_uncorrected", 3.0, "3 uncorrected"),
        ("gpu.remap_pending", True, "row remap"),
        ("gpu.remap_failure", True, "could not be remapped: replace"),
        ("gpu.throttle", "GPU 0: thermal", "throttled: GPU 0: thermal"),
    ],
)
def test_what_the_card_reports_about_itself_makes_numbers_invalid(
    name: str, value: Any, text: str
) -> None:
    found = builder.evidence("preflight", WHERE)
    fact = replace(found.facts["gpu.count"], name=name, value=value)
    check = builder.row(
        "preflight", "gpu_clean", replace(found, facts={**found.facts, name: fact}), WHERE
    )
    assert said(check) == WRONG and text in check.reason


@pytest.mark.parametrize(
    ("toggles", "config", "warned"),
    [
        ({}, {}, False),
        ({"NSA_PREFILL_BATCHED": "0"}, {}, True),
        ({"NSA_PREFILL_BATCHED": "off"}, {}, True),
        ({"NSA_PREFILL_BATCHED": "0"}, {"train.seq_len": 512}, False),
        ({"NSA_PREFILL_BATCHED": "0", "NSA_SEQ_LEN": "1024"}, {"train.seq_len": 512}, True),
    ],
)
def test_sequential_prefill_of_long_sequences_is_warned_of(
    toggles: dict[str, str], config: dict[str, Any], warned: bool
) -> None:
    where = builder.context(toggles=toggles, config_overrides=config)
    check = row("prefill", where)
    assert check.outcome is Outcome.PASS
    assert (check.code is Reason.WARNING) == warned
    assert "NSA_PREFILL_BATCHED=1" in check.remedy if warned else not check.remedy


_SAVES, _STOPS = "how the trainer saves and resumes", "the signal or the file .HALT"
_NUMBERS = "a number that is not finite"
SAVE = "test_a_save_is_of_one_moment_however_long_it_takes"
STOP = "test_training_stops_at_a_number_that_is_not_finite[loss]"
SEED = "test_the_seed_decides_the_weights"
SHORT = "test_a_short_launch_has_the_schedule_of_the_whole_run"


@pytest.mark.parametrize(
    ("what", "module", "failed", "advice"),
    [
        ("whole_model", "test_whole_model", (SEED,), "torch.manual_seed"),
        ("whole_model", "test_whole_model", (f"{SHORT}[words0-1000]",), "schedule"),
        ("whole_model", "test_whole_model", ("test_logits", SEED), "equations"),
        ("whole_model", "test_whole_model", ("test_logits",), "equations"),
        *(("safeguards", "test_safeguards", (n,), _SAVES) for n in preflight._OF_CHECKPOINTS),
        *(("safeguards", "test_safeguards", (n,), _STOPS) for n in preflight._OF_STOPPING),
        ("safeguards", "test_safeguards", (STOP,), _NUMBERS),
        # Where numbers that are not finite go through too, those are looked at first.
        ("safeguards", "test_safeguards", (SAVE, STOP), _NUMBERS),
    ],
)
def test_what_failed_has_a_remedy_of_its_own(
    what: str, module: str, failed: tuple[str, ...], advice: str
) -> None:
    def change(made: Any) -> Any:
        others = tuple(c for c in made.junit.cases if module not in c.classname)
        one = next(c for c in made.junit.cases if module in c.classname)
        named = tuple(replace(one, name=name, status="failed") for name in failed)
        passed = replace(one, name="test_another")
        return replace(made, junit=replace(made.junit, cases=(*others, passed, *named)))

    check = answers.row("preflight", what, change, only=("sanity",))
    assert said(check) == (Outcome.FAIL, Reason.TEST_FAILED)
    assert advice in check.remedy
    if what == "safeguards":
        assert [one for one in (_SAVES, _STOPS, _NUMBERS) if one in check.remedy] == [advice]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("test_whole_model.py", preflight._OF_THE_BEGINNING),
        ("test_safeguards.py", preflight._OF_CHECKPOINTS + preflight._OF_STOPPING),
    ],
)
def test_the_tests_with_a_remedy_of_their_own_are_there(
    module: str, names: tuple[str, ...]
) -> None:
    text = files("nsa.tests").joinpath(module).read_text("utf-8")
    for name in names:
        assert f"def {name}(" in text


def test_each_safeguard_is_about_numbers_saves_or_stops() -> None:
    """A test that is added to the module gets the remedy of what it is about."""
    text = files("nsa.tests").joinpath("test_safeguards.py").read_text("utf-8")
    known = {*preflight._OF_CHECKPOINTS, *preflight._OF_STOPPING}
    others = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE)) - known
    assert others == {
        "test_training_stops_at_a_number_that_is_not_finite",
        "test_a_gradient_that_overflows_in_fp16_updates_nothing",
        "test_what_one_rank_sees_ends_all",
    }


@pytest.mark.parametrize(
    ("what", "module"), [(what, module) for what, module, *_ in preflight._SANITY_TESTS]
)
def test_sanity_tests_have_to_run(what: str, module: str) -> None:
    def spoil(status: str) -> spoil.Change:
        def change(made: Any) -> Any:
            cases = tuple(
                replace(case, status=status) if module in case.classname else case
                for case in made.junit.cases
            )
            return replace(made, junit=replace(made.junit, cases=cases))

        return change

    for status, outcome in (("failed", Outcome.FAIL), ("skipped", Outcome.SKIPPED)):
        found = builder.evidence("preflight", WHERE, change=spoil(status), only=("sanity",))
        assert builder.row("preflight", what, found, WHERE).outcome is outcome

    def forgotten(made: Any) -> Any:
        cases = tuple(case for case in made.junit.cases if module not in case.classname)
        return replace(made, junit=replace(made.junit, cases=cases))

    found = builder.evidence("preflight", WHERE, change=forgotten, only=("sanity",))
    check = builder.row("preflight", what, found, WHERE)
    assert said(check) == (Outcome.INCOMPLETE, Reason.NOTHING_COLLECTED)
