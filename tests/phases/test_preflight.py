"""Preflight: the wrong machine or checkout is INVALID, a broken trainer FAIL, a doubt a warning."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from phases import preflight
from phases.kit.playbook import playbook
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


# What is said where shipped tests fail: by the topic of the first one, else by their row.
EQUATIONS, READER = "equations", "a separator after each"
SAVES, STOPS = "how the trainer saves and resumes", "the signal or the file .HALT"
NUMBERS = "a number that is not finite"


@pytest.mark.parametrize(("what", "failed", "advice"), [
    ("whole_model", ["test_beginning seed"], "torch.manual_seed"),
    ("whole_model", ["test_beginning first_weights"], "how the trainer draws its weights"),
    ("whole_model", ["test_beginning seed", "test_beginning first_weights"], "torch.manual_seed"),
    ("whole_model", ["test_beginning schedule"], "what counts the steps of the schedule"),
    ("whole_model", ["test_beginning seed", "test_whole_model"], EQUATIONS),
    ("whole_model", ["test_whole_model"], EQUATIONS),
    ("whole_model", ["test_whole_model unheard_of"], EQUATIONS),
    ("documents", ["test_documents"], READER),
    ("documents", ["test_documents unread"], "let whatever a file or the network raises"),
    ("documents", ["test_places places", "test_tokens tokens"], "compare the tokenizer"),
    ("documents", ["test_places batches"], "fills its micro-batches"),
    ("documents", ["test_places places", "test_places batches"], "what `seek` makes of it"),
    ("documents", ["test_places held_out"], "what evaluation reads"),
    ("documents", ["test_places other_files"], "size and all bytes"),
    # What is read by the rule fails with it.
    ("documents", ["test_documents held_out_rule", "test_documents"], "of a document alone decide"),
    ("safeguards", ["test_safeguards overflow"], "cleared like any other"),
    ("safeguards", ["test_saves val_loss"], "which evaluation's loss"),
    ("safeguards", ["test_saves checkpoints"], SAVES),
    ("safeguards", ["test_safeguards stopping"], STOPS),
    ("safeguards", ["test_safeguards"], NUMBERS),
    # Where numbers that are not finite go through too, those are looked at first.
    ("safeguards", ["test_resumes checkpoints", "test_safeguards"], NUMBERS),
])  # fmt: skip
def test_the_first_that_failed_says_what_to_do(what: str, failed: list[str], advice: str) -> None:
    """In the order of modules; in one module in that of its tests. Others passed."""

    def change(cases: Any) -> Any:
        others = tuple(c for c in cases if f"test_{what}" not in c.classname)
        one = next(c for c in cases if f"test_{what}" in c.classname)
        broken = []
        for module, _, topic in (told.partition(" ") for told in failed):
            properties = {**one.properties, **({"topic": topic} if topic else {})}
            where = f"nsa.tests.{module}"
            broken.append(replace(one, classname=where, status="failed", properties=properties))
        return (*others, replace(one, name="test_another"), *broken)

    check = answers.row("preflight", what, spoil.at("junit.cases", change), only=("sanity",))
    says(check, (Outcome.FAIL, Reason.TEST_FAILED), remedy=advice)
    if advice in (SAVES, STOPS, NUMBERS):
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


# Tests that say nothing of what they are about: their row does.
WITHOUT_TOPIC = {
    "test_whole_model": None,
    "test_documents": None,
    "test_safeguards": {
        "test_training_stops_at_a_number_that_is_not_finite",
        "test_training_stops_at_one_micro_batch_that_is_not_finite",
        "test_what_one_rank_sees_ends_all",
    },
}


@pytest.mark.parametrize("module", [
    module for what in ("whole_model", "documents", "safeguards")
    for module in preflight._SANITY_TESTS[what][1:]
])  # fmt: skip
def test_shipped_tests_name_topics_that_there_are(module: str) -> None:
    """One that is added to the safeguards says which of them it is about."""
    tree = ast.parse(files("nsa.tests").joinpath(f"{module}.py").read_text("utf-8"))
    whole = [topic for node in tree.body if isinstance(node, ast.Assign) for topic in topics(node)]
    told = {
        node.name: [t for mark in node.decorator_list for t in topics(mark)] or whole
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert {topic for named in told.values() for topic in named} <= set(playbook().by_topic)
    if (left := WITHOUT_TOPIC.get(module, set())) is not None:
        assert {name for name, named in told.items() if not named} == left


def topics(node: ast.AST) -> list[str]:
    """What the marks below it name."""
    return [
        call.args[0].value
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "topic"
        and isinstance(call.args[0], ast.Constant)
    ]


@pytest.mark.parametrize("what", preflight._SANITY_TESTS)
@pytest.mark.parametrize(
    ("status", "wanted"),
    [("failed", (Outcome.FAIL, Reason.TEST_FAILED)), ("skipped", UNTOLD), ("", UNCOLLECTED)],
)
def test_sanity_tests_have_to_run(what: str, status: str, wanted: Any) -> None:
    """With the status of these tests; without them if it is none."""
    _, *modules = preflight._SANITY_TESTS[what]

    def change(case: Any) -> Any:
        if case.classname.rpartition(".")[2] not in modules:
            return case
        return replace(case, status=status) if status else None

    assert said(answers.row("preflight", what, spoil.cases(change), only=("sanity",))) == wanted
