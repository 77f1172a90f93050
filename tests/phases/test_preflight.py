"""Preflight: the wrong machine or checkout is INVALID, a broken trainer FAIL, a doubt a warning."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from phases import preflight
from phases.kit import table
from runbook.config.load import load_profile
from runbook.config.phase import PlanContext
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import JUnitCase
from tests.phases import answers, builder, spoil
from tests.phases.answers import (
    CRASHED,
    FINE,
    MACHINE,
    NOTHING,
    UNCOLLECTED,
    WARNED,
    WHERE,
    said,
    says,
)

OF_GPUS = (
    "cuda", "gpus", "extra_gpus", "gpu_driver", "mig", "gpu_memory", "pcie", "nvlink", "gpu_clean",
)  # fmt: skip


def row(what: str, where: PlanContext = WHERE, **facts: Any) -> Check:
    """The row with these facts changed; one that no healthy machine has is named as it is."""
    known = {name: value for name, value in facts.items() if "." not in name}
    found = builder.facts(**known)
    more = {name: replace(found["gpu.count"], name=name, value=facts[name])
            for name in facts.keys() - known.keys()}  # fmt: skip
    evidence = replace(builder.evidence("preflight", where), facts={**found, **more})
    return builder.row("preflight", what, evidence, where)


# Row, what the machine tells, and what the row says of it: of the reason, of the remedy.
SAID: list[tuple[str, dict[str, Any], tuple[Outcome, Reason], str, str]] = [
    ("branch", {"git_branch": "topic"}, MACHINE, "", "o"),
    ("branch", {"git_behind": 2.0}, WARNED, "on main, 2 commits behind (as seen)", "git pull"),
    ("clean_tree", {"git_dirty": True}, MACHINE, "", "o"),
    ("trainer_imports", {"trainer_imports": False}, CRASHED, "", "o"),
    ("gpus", {"gpu_count": 1.0}, MACHINE, "", "o"),
    ("gpus", {"gpu_count": 0.0}, MACHINE, "", "o"),
    ("gpus", {"gpu_names": "NVIDIA A100 80GB PCIe, Tesla T4"}, MACHINE, "Tesla T4", "o"),
    ("extra_gpus", {"gpu_count": 8.0}, WARNED, "8 GPUs are visible", "CUDA_VISIBLE_DEVICES=0,1"),
    ("cuda", {"torch_device_count": 1.0}, MACHINE, "", "o"),
    ("gpu_driver", {"gpu_driver": "535.183.01"}, WARNED, "all the same", "o"),
    ("mig", {"gpu_mig": True}, MACHINE, "", "o"),
    ("gpu_memory", {"gpu_memory_total_mib": 40_960.0}, MACHINE, "", "o"),
    ("pcie", {"gpu_pcie_gen_max": 3.0}, MACHINE, "", "o"),
    ("pcie", {"gpu_pcie_width": 8.0}, MACHINE, "", "o"),
    # An idle link trains down.
    ("pcie", {"gpu.pcie_gen": 1.0}, FINE, "generation 4", ""),
    ("nvlink", {"gpu_nvlink": True}, MACHINE, "", "o"),
    ("gpu_power", {"gpu_power_limit": 0.94}, MACHINE, "", "o"),
    ("gpu_power", {"gpu_power_limit": 0.96}, FINE, "", ""),
    # The clocks under load still decide, in row `devices` of each launch.
    ("gpu_power", {"gpu_power_limit": None}, WARNED, "unknown", ""),
    ("gpu_clean", {"gpu_processes": 1.0}, MACHINE, "", "o"),
    ("gpu_clean", {"gpu_memory_used_mib": 20_000.0}, MACHINE, "", "o"),
    ("gpu_clean", {"gpu.caps": "GPU 0: power cap"}, FINE, "GPU 0: power cap", ""),
    ("gpu_clean", {"gpu.ecc_uncorrected": 3.0}, MACHINE, "3 uncorrected", "o"),
    ("gpu_clean", {"gpu.remap_pending": True}, MACHINE, "row remap", "o"),
    ("gpu_clean", {"gpu.remap_failure": True}, MACHINE, "could not be remapped: replace", "o"),
    ("gpu_clean", {"gpu.throttle": "GPU 0: thermal"}, MACHINE, "throttled: GPU 0: thermal", "o"),
    ("disk_free", {"disk_free_gib": 2.0}, MACHINE, "", "o"),
    ("disk_speed", {"disk_write_mib_s": 3.0}, MACHINE, "", "o"),
    ("leftovers", {"processes_leftover": 2.0}, MACHINE, "", "o"),
    ("leftovers", {"processes_other_runs": 3.0}, WARNED,
     "3 of runs that go on beside: as seen", "by its pid"),
    ("variables", {"env_problems": "NSA_OPT_FUSE: no such toggle"}, MACHINE, "no such", "o"),
    ("variables", {"python_startup": "/x/sitecustomize.py"}, WARNED,
     "every launch runs /x/sitecustomize.py first", ""),
    ("needs", {"needs_missing": "the package datasets is not here"}, MACHINE, "datasets", "o"),
    ("artifacts", {"git_sha": None}, NOTHING, "git_sha.txt", "o"),
    ("artifacts", {"torch_version": None}, NOTHING, "collect_env.txt", "o"),
    ("artifacts", {"gpu_driver": None}, NOTHING, "nvidia_smi.xml", "o"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "facts", "wanted", "reason", "remedy"),
    SAID,
    ids=[f"{what}-{'-'.join(facts)}-{number}" for number, (what, facts, *_) in enumerate(SAID)],
)
def test_what_a_row_says_of_a_machine(
    what: str, facts: dict[str, Any], wanted: tuple[Outcome, Reason], reason: str, remedy: str
) -> None:
    assert said(row(what)) == FINE
    check = says(row(what, **facts), wanted, reason, remedy=remedy)
    assert bool(check.rerun) is (check.outcome is not Outcome.PASS)


UNKNOWN = (
    "git_sha", "torch_version", "torch_cuda_available", "gpu_count", "gpu_mig", "gpu_driver",
    "gpu_memory_total_mib", "gpu_pcie_gen_max", "gpu_nvlink", "gpu_processes",
)  # fmt: skip


@pytest.mark.parametrize("what", ["sha", "torch", *OF_GPUS])
def test_what_is_not_known_is_incomplete(what: str) -> None:
    assert said(row(what, **dict.fromkeys(UNKNOWN))) == NOTHING


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
    assert said(row("disk_free", where, disk_free_gib=2.0)) == MACHINE


def test_a_profile_without_a_branch_takes_any_and_warns_of_changes() -> None:
    where = builder.context("cpu")
    assert row("branch", where, git_branch="topic").outcome is Outcome.SKIPPED
    assert said(row("clean_tree", where, git_dirty=True)) == (Outcome.PASS, Reason.WARNING)


@pytest.mark.parametrize("what", ["artifacts", "sha", "clean_tree"])
def test_an_installed_package_has_no_commit_which_only_a_branch_forbids(what: str) -> None:
    nothing = {"git_sha": None, "git_dirty": None}
    says(row(what, builder.context("cpu"), **nothing), WARNED, "commit unknown: ")
    assert row(what, **nothing).outcome is Outcome.INCOMPLETE


def test_a_cpu_has_no_gpu_rows_but_all_of_them_stand_there() -> None:
    for what in OF_GPUS:
        assert said(row(what, builder.context("cpu"))) == (Outcome.SKIPPED, Reason.NEEDS_CUDA)


def test_generation_3_is_right_on_its_own_profile_and_4_is_not() -> None:
    where = builder.context("a100x2_pcie3")
    assert row("pcie", where, gpu_pcie_gen_max=3.0).outcome is Outcome.PASS
    assert said(row("pcie", where, gpu_pcie_gen_max=4.0)) == MACHINE


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
    says(check, MACHINE, why, remedy="CUDA_VISIBLE_DEVICES")


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
    assert said(check) == ((Outcome.PASS, Reason.OK) if new_enough else MACHINE)
    assert new_enough or "update the driver" in check.remedy


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
# Shipped tests with a remedy of their own.
OWN = table("playbook")["tests"]
_NUMBERS = "a number that is not finite"
SAVE = "test_a_save_is_of_one_moment_however_long_it_takes"
STOP = "test_training_stops_at_a_number_that_is_not_finite[loss]"
NORMS = "test_norms_begin_as_one_and_gates_half_open"
SEED = "test_the_seed_decides_the_weights"
STEPS = "test_steps_train_on_what_is_read_once_and_in_order"
PLACE = "test_reading_goes_on_where_a_checkpoint_was_written[local-1-2]"
HELD_OUT = "test_evaluation_is_the_same_wherever_training_is"
SHORT = "test_a_short_launch_has_the_schedule_of_the_whole_run"


@pytest.mark.parametrize(
    ("what", "module", "failed", "advice"),
    [
        ("whole_model", "test_whole_model", (SEED,), "torch.manual_seed"),
        ("whole_model", "test_whole_model", (NORMS,), "how the trainer draws its weights"),
        ("whole_model", "test_whole_model", (NORMS, SEED), "torch.manual_seed"),
        ("whole_model", "test_whole_model", (f"{SHORT}[words0-1000]",), "schedule"),
        ("whole_model", "test_whole_model", ("test_logits", SEED), "equations"),
        ("whole_model", "test_whole_model", ("test_logits",), "equations"),
        ("documents", "test_documents", ("test_a_long_document",), "a separator after each"),
        ("documents", "test_documents", (STEPS,), "fills its micro-batches"),
        ("documents", "test_documents", (STEPS, PLACE), "what `seek` makes of it"),
        ("documents", "test_documents", (PLACE,), "what `seek` makes of it"),
        ("documents", "test_documents", (HELD_OUT,), "what evaluation reads"),
        ("documents", "test_documents", (HELD_OUT, PLACE), "a separator after each"),
        *(("safeguards", "test_safeguards", (n,), _SAVES) for n in OWN["checkpoints"]),
        *(("safeguards", "test_safeguards", (n,), _STOPS) for n in OWN["stopping"]),
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
    says(check, (Outcome.FAIL, Reason.TEST_FAILED), remedy=advice)
    if what == "safeguards":
        assert [one for one in (_SAVES, _STOPS, _NUMBERS) if one in check.remedy] == [advice]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("test_whole_model.py", OWN["beginning"]),
        ("test_documents.py", OWN["places"] + OWN["held_out"]),
        ("test_safeguards.py", OWN["checkpoints"] + OWN["stopping"]),
    ],
)
def test_the_tests_with_a_remedy_of_their_own_are_there(module: str, names: list[str]) -> None:
    text = files("nsa.tests").joinpath(module).read_text("utf-8")
    for name in names:
        assert f"def {name}(" in text


def test_each_safeguard_is_about_numbers_saves_or_stops() -> None:
    """A test that is added to the module gets the remedy of what it is about."""
    text = files("nsa.tests").joinpath("test_safeguards.py").read_text("utf-8")
    known = {*OWN["checkpoints"], *OWN["stopping"]}
    others = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE)) - known
    assert others == {
        "test_training_stops_at_a_number_that_is_not_finite",
        "test_a_gradient_that_overflows_in_fp16_updates_nothing",
        "test_what_one_rank_sees_ends_all",
    }


@pytest.mark.parametrize(
    ("what", "module"), [(what, module) for what, (module, _) in preflight._SANITY_TESTS.items()]
)
def test_sanity_tests_have_to_run(what: str, module: str) -> None:
    def spoiled(status: str) -> Check:
        """With the status of these tests; without them if it is none."""

        def change(case: JUnitCase) -> JUnitCase | None:
            if module not in case.classname:
                return case
            return replace(case, status=status) if status else None

        return answers.row("preflight", what, spoil.cases(change), only=("sanity",))

    assert spoiled("failed").outcome is Outcome.FAIL
    assert spoiled("skipped").outcome is Outcome.SKIPPED
    says(spoiled(""), UNCOLLECTED)
