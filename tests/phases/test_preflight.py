"""Preflight: the wrong machine or checkout is INVALID, a broken trainer FAIL, a doubt a warning."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from phases import preflight
from phases.kit import table
from runbook.config.phase import PlanContext
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import PhaseEvidence
from tests.phases import answers, builder, spoil
from tests.phases.answers import (
    CRASHED,
    FINE,
    MACHINE,
    NEEDS_CUDA,
    NOTHING,
    UNCOLLECTED,
    WARNED,
    WHERE,
    said,
    says,
)

UNTOLD = (Outcome.SKIPPED, Reason.NOTHING_COLLECTED)
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


def of(
    what: str,
    wanted: tuple[Outcome, Reason],
    reason: str = "",
    remedy: str = "",
    on: str = "a100x2_pcie4",
    **facts: Any,
) -> Any:
    """A row, and what it says on a machine of this profile that tells these facts."""
    named = "-".join([what, *facts, str(wanted[0])])
    return pytest.param(what, wanted, reason, remedy, on, facts, id=named)


COMMITLESS = {"git_sha": None, "git_dirty": None}
BLIND = {"torch_cuda_available": False}
HIDDEN = "CUDA_VISIBLE_DEVICES"
UNKNOWN = dict.fromkeys((
    "git_sha", "torch_version", "torch_cuda_available", "gpu_count", "gpu_mig", "gpu_driver",
    "gpu_memory_total_mib", "gpu_pcie_gen_max", "gpu_nvlink", "gpu_processes",
))  # fmt: skip


def driver(version: str, cuda: str | None, new_enough: bool) -> Any:
    wanted, remedy = (FINE, "") if new_enough else (MACHINE, "update the driver")
    return of("gpu_driver", wanted, "", remedy, **BLIND, gpu_driver=version, torch_cuda=cuda)


@pytest.mark.parametrize(("what", "wanted", "reason", "remedy", "on", "facts"), [
    of("branch", MACHINE, git_branch="topic"),
    of("branch", WARNED, "on main, 2 commits behind (as seen)", "git pull", git_behind=2.0),
    # A profile without a branch takes any, and warns of changes.
    of("branch", (Outcome.SKIPPED, Reason.NOT_ASKED_FOR), on="cpu", git_branch="topic"),
    of("clean_tree", WARNED, on="cpu", git_dirty=True),
    of("clean_tree", MACHINE, git_dirty=True),
    # An installed package has no commit, which only a branch forbids.
    *(of(what, WARNED, "commit unknown: ", on="cpu", **COMMITLESS)
      for what in ("artifacts", "sha", "clean_tree")),
    *(of(what, NOTHING, **COMMITLESS) for what in ("artifacts", "sha", "clean_tree")),
    of("trainer_imports", CRASHED, trainer_imports=False),
    of("gpus", MACHINE, gpu_count=1.0),
    of("gpus", MACHINE, gpu_count=0.0),
    of("gpus", MACHINE, "Tesla T4", gpu_names="NVIDIA A100 80GB PCIe, Tesla T4"),
    of("extra_gpus", WARNED, "8 GPUs are visible", f"{HIDDEN}=0,1", gpu_count=8.0),
    of("cuda", MACHINE, torch_device_count=1.0),
    # Why torch sees no GPU.
    of("cuda", MACHINE, "torch 2.13.0 was built without CUDA", HIDDEN, **BLIND, torch_cuda=None),
    of("cuda", MACHINE, "as seen", HIDDEN, **BLIND, gpu_count=None),
    of("cuda", MACHINE, "all GPUs are hidden", HIDDEN, **BLIND, gpu_count=0.0),
    of("cuda", MACHINE, "nvidia-smi lists no GPU", HIDDEN, **BLIND, gpu_count=0.0,
       gpu_installed=0.0),
    of("cuda", MACHINE, "driver 550.90.07, but CUDA 13.0 of this torch needs 580.65", HIDDEN,
       **BLIND, gpu_driver="550.90.07"),
    of("cuda", MACHINE, "see collect_env.txt", HIDDEN, **BLIND),
    # The driver is held against the CUDA that torch was built for.
    of("gpu_driver", WARNED, "all the same", gpu_driver="535.183.01"),
    driver("535.183.01", "13.0", False), driver("570.133.20", "13.2", False),
    driver("580.65.05", "13.0", False), driver("580.65.06", "13.0", True),
    driver("610.1", "13.0", True), driver("535.183.01", "12.8", True),
    driver("515.43.04", "12.1", False), driver("535.183.01", None, True),
    driver("535.183.01", "99.0", True),
    of("mig", MACHINE, gpu_mig=True),
    of("gpu_memory", MACHINE, gpu_memory_total_mib=40_960.0),
    of("pcie", MACHINE, gpu_pcie_gen_max=3.0),
    of("pcie", FINE, on="a100x2_pcie3", gpu_pcie_gen_max=3.0),
    of("pcie", MACHINE, on="a100x2_pcie3", gpu_pcie_gen_max=4.0),
    of("pcie", MACHINE, gpu_pcie_width=8.0),
    # An idle link trains down.
    of("pcie", FINE, "generation 4", **{"gpu.pcie_gen": 1.0}),
    of("nvlink", MACHINE, gpu_nvlink=True),
    of("gpu_power", MACHINE, gpu_power_limit=0.94),
    of("gpu_power", FINE, gpu_power_limit=0.96),
    # The clocks under load still decide, in row `devices` of each launch.
    of("gpu_power", WARNED, "unknown", gpu_power_limit=None),
    of("gpu_clean", MACHINE, gpu_processes=1.0),
    of("gpu_clean", MACHINE, gpu_memory_used_mib=20_000.0),
    of("gpu_clean", FINE, "GPU 0: power cap", **{"gpu.caps": "GPU 0: power cap"}),
    of("gpu_clean", MACHINE, "3 uncorrected", **{"gpu.ecc_uncorrected": 3.0}),
    of("gpu_clean", MACHINE, "row remap", **{"gpu.remap_pending": True}),
    of("gpu_clean", MACHINE, "could not be remapped: replace", **{"gpu.remap_failure": True}),
    of("gpu_clean", MACHINE, "throttled: GPU 0: th", **{"gpu.throttle": "GPU 0: thermal"}),
    of("disk_free", MACHINE, disk_free_gib=2.0),
    of("disk_speed", MACHINE, disk_write_mib_s=3.0),
    of("leftovers", MACHINE, processes_leftover=2.0),
    of("leftovers", WARNED, "3 of runs that go on beside: as seen", "by its pid",
       processes_other_runs=3.0),
    of("variables", MACHINE, "no such", env_problems="NSA_OPT_FUSE: no such toggle"),
    of("variables", WARNED, "every launch runs /x/sitecustomize.py first",
       python_startup="/x/sitecustomize.py"),
    of("needs", MACHINE, "datasets", needs_missing="the package datasets is not here"),
    of("artifacts", NOTHING, "git_sha.txt", git_sha=None),
    of("artifacts", NOTHING, "collect_env.txt", torch_version=None),
    of("artifacts", NOTHING, "nvidia_smi.xml", gpu_driver=None),
    # Each setting of the host that skews numbers is named; none decides, and some cannot be read.
    of("host_settings", WARNED, "--shm-size", host_shm_gib=0.0625),
    of("host_settings", WARNED, "nearly full", host_shm_free_gib=0.01),
    of("host_settings", WARNED, "loaded", host_load_per_cpu=0.9),
    of("host_settings", WARNED, "keep CPUs busy", host_busy_cpus=3.5),
    *(of("host_settings", FINE, f"unreadable: {name} (as seen)", **{f"host_{name}": None})
      for name in ("shm_gib", "shm_free_gib", "load_per_cpu", "busy_cpus")),
    of("host_settings", FINE, "3 settings", host_shm_gib=None),
    of("host_settings", FINE, host_busy_cpus="?"),
    *(of(what, NOTHING, **UNKNOWN) for what in ("sha", "torch", *OF_GPUS)),
    # A CPU has no rows of GPUs, but all of them stand there.
    *(of(what, NEEDS_CUDA, on="cpu") for what in OF_GPUS),
])  # fmt: skip
def test_what_a_row_says_of_a_machine(
    what: str,
    wanted: tuple[Outcome, Reason],
    reason: str,
    remedy: str,
    on: str,
    facts: dict[str, Any],
) -> None:
    check = says(row(what, builder.context(on), **facts), wanted, reason, remedy=remedy)
    assert bool(check.rerun) is (check.outcome not in (Outcome.PASS, Outcome.SKIPPED))
    assert bool(check.remedy) >= (check.code is Reason.WARNING)


def test_a_host_without_anything_to_say_passes() -> None:
    check = says(row("host_settings"), FINE)
    assert check.reason == "4 settings read, none skews numbers" and not check.required
    says(builder.row("preflight", "host_settings", PhaseEvidence(), WHERE), NOTHING)


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
    check = row("prefill", builder.context(toggles=toggles, config_overrides=config))
    says(check, WARNED if warned else FINE)
    assert "NSA_PREFILL_BATCHED=1" in check.remedy if warned else not check.remedy


# Shipped tests with a remedy of their own.
OWN = table("playbook")["tests"]
SAVES, STOPS = "how the trainer saves and resumes", "the signal or the file .HALT"
NUMBERS = "a number that is not finite"
SAVE = "test_a_save_is_of_one_moment_however_long_it_takes"
STOP = "test_training_stops_at_a_number_that_is_not_finite[loss]"
NORMS = "test_norms_begin_as_one_and_gates_half_open"
SEED = "test_the_seed_decides_the_weights"
STEPS = "test_steps_train_on_what_is_read_once_and_in_order"
PLACE = "test_reading_goes_on_where_a_checkpoint_was_written[local-1-2]"
HELD_OUT = "test_evaluation_is_the_same_wherever_training_is"
SHORT = "test_a_short_launch_has_the_schedule_of_the_whole_run[words0-1000]"
DOCUMENT = "test_a_long_document_is_read_whole[True]"
TOKENS = "test_a_long_text_is_encoded_as_a_whole[byte]"
RULE = "test_what_is_held_out_is_known_by_its_text_alone"
OVERFLOW = "test_a_gradient_that_overflows_in_fp16_updates_nothing"
VAL_LOSS = "test_a_checkpoint_has_the_validation_loss_of_its_own_step_or_none"


@pytest.mark.parametrize(("what", "failed", "advice"), [
    ("whole_model", (SEED,), "torch.manual_seed"),
    ("whole_model", (NORMS,), "how the trainer draws its weights"),
    ("whole_model", (NORMS, SEED), "torch.manual_seed"),
    ("whole_model", (SHORT,), "what counts the steps of the schedule"),
    ("whole_model", ("test_logits", SEED), "equations"),
    ("whole_model", ("test_logits",), "equations"),
    ("documents", (DOCUMENT,), "a separator after each"),
    ("documents", (STEPS,), "fills its micro-batches"),
    ("documents", (STEPS, PLACE), "what `seek` makes of it"),
    ("documents", (PLACE,), "what `seek` makes of it"),
    ("documents", (HELD_OUT,), "what evaluation reads"),
    ("documents", tuple(OWN["other_files"]), "size and all bytes"),
    ("documents", (HELD_OUT, PLACE), "a separator after each"),
    # What is read through the tokenizer, or by the rule, fails with it.
    ("documents", (DOCUMENT, TOKENS), "compare the tokenizer"),
    ("documents", (DOCUMENT, HELD_OUT, PLACE, RULE), "the text of a document alone"),
    ("safeguards", (OVERFLOW,), "cleared like any other"),
    ("safeguards", (VAL_LOSS,), "which evaluation's loss"),
    *(("safeguards", (name,), SAVES) for name in OWN["checkpoints"] if name != VAL_LOSS),
    *(("safeguards", (name,), STOPS) for name in OWN["stopping"]),
    ("safeguards", (STOP,), NUMBERS),
    # Where numbers that are not finite go through too, those are looked at first.
    ("safeguards", (SAVE, STOP), NUMBERS),
])  # fmt: skip
def test_what_failed_has_a_remedy_of_its_own(
    what: str, failed: tuple[str, ...], advice: str
) -> None:
    def change(cases: Any) -> Any:
        others = tuple(c for c in cases if f"test_{what}" not in c.classname)
        one = next(c for c in cases if f"test_{what}" in c.classname)
        named = tuple(replace(one, name=name, status="failed") for name in failed)
        return (*others, replace(one, name="test_another"), *named)

    check = answers.row("preflight", what, spoil.at("junit.cases", change), only=("sanity",))
    says(check, (Outcome.FAIL, Reason.TEST_FAILED), remedy=advice)
    if what == "safeguards" and not {OVERFLOW, VAL_LOSS} & set(failed):
        assert [one for one in (SAVES, STOPS, NUMBERS) if one in check.remedy] == [advice]


def test_a_test_that_failed_in_several_cases_is_told_once() -> None:
    def change(cases: Any) -> Any:
        one = next(c for c in cases if "test_documents" in c.classname)
        told = {"test_read[0-1]": "batch 2\nmore", "test_read[0-2]": "batch 3", "test_kept": "gone"}
        failed = (replace(one, name=n, status="failed", message=m) for n, m in told.items())
        return (*cases, *failed)

    check = answers.row("preflight", "documents", spoil.at("junit.cases", change), only=("sanity",))
    wanted = "definition failed: test_read[0-1], [0-2]: batch 2; test_kept: gone"
    says(check, (Outcome.FAIL, Reason.TEST_FAILED), wanted)


@pytest.mark.parametrize(("module", "names"), [
    ("test_whole_model.py", OWN["schedule"] + OWN["beginning"] + OWN["shape"]),
    ("test_documents.py", [
        name
        for topic in ("other_files", "places", "held_out", "held_out_rule", "reader", "tokens",
                      "unread", "read_ahead")
        for name in OWN[topic]
    ]),
    ("test_saves.py", [*OWN["checkpoints"], *OWN["records"][-3:]]),
    ("test_safeguards.py", [
        *(n for topic in ("stopping", "clipping", "overflow", "evaluations", "unseen")
          for n in OWN[topic]),
        *OWN["records"][:-3],
    ]),
])  # fmt: skip
def test_the_tests_with_a_remedy_of_their_own_are_there(module: str, names: list[str]) -> None:
    """One that is added to the safeguards gets the remedy of what it is about."""
    text = files("nsa.tests").joinpath(module).read_text("utf-8")
    there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    assert set(names) <= there
    if module == "test_saves.py":
        assert there == set(names)
    if module == "test_safeguards.py":
        assert there - set(names) == {
            "test_training_stops_at_a_number_that_is_not_finite",
            "test_training_stops_at_one_micro_batch_that_is_not_finite",
            "test_what_one_rank_sees_ends_all",
        }


@pytest.mark.parametrize(
    ("what", "module"),
    [(what, module) for what, (_, module, *_) in preflight._SANITY_TESTS.items()],
)
@pytest.mark.parametrize(
    ("status", "wanted"),
    [("failed", (Outcome.FAIL, Reason.TEST_FAILED)), ("skipped", UNTOLD), ("", UNCOLLECTED)],
)
def test_sanity_tests_have_to_run(what: str, module: str, status: str, wanted: Any) -> None:
    """With the status of these tests; without them if it is none."""

    def change(case: Any) -> Any:
        if module not in case.classname:
            return case
        return replace(case, status=status) if status else None

    assert said(answers.row("preflight", what, spoil.cases(change), only=("sanity",))) == wanted
