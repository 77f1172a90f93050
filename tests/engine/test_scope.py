"""The first line of a verdict follows from what ran and what was required, and from no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runbook.config.load import load_profile, profile_names
from runbook.config.settings import parse_settings
from runbook.engine.scope import departures, scope_of, what_ran
from runbook.errors import UsageError
from runbook.folder.launch.shapes import ENV, shaped
from runbook.records import Outcome, PhaseRecord, RunRecord, Verdict
from runbook.records.run import Ran
from tests.config.test_profiles import written
from tests.factory import records
from tests.phases import builder
from tests.reports.samples import run

A100 = Ran(
    device="cuda",
    name="NVIDIA A100 80GB PCIe",
    ranks=2,
    parameters=78_404_784,
    seq_len=2048,
    global_batch=2,
    accumulation=2,
    dtype="bf16",
)


def record(profile: str = "a100x2_pcie4", **changed: Any) -> RunRecord:
    found = load_profile(profile)
    told = {
        "profile": found.name,
        "profile_document": found.model_dump(mode="json"),
        "scope": "typed by a person",
        "required": found.required,
        "environment": {"gpu.pcie_gen_max": "4"},
    }
    return run(Verdict.GO, (), **(told | changed))


def phase(*ran: Ran) -> PhaseRecord:
    return records.phase("baseline", outcome=Outcome.PASS, ran=ran)


def test_a_gpu_profile_whose_launches_ran_on_the_cpu_says_cpu() -> None:
    cpu = A100.model_copy(update={"device": "cpu", "name": "Xeon", "parameters": 460_000})
    typed = {**record().profile_document, "title": "2xA100 PCIe4"}
    said = scope_of(record(profile_document=typed), [phase(cpu)])
    assert said.startswith("2 ranks on CPU; 0.5M parameters")
    assert "A100" not in said


def test_what_ran_is_read_from_env_json() -> None:
    where = builder.context()
    found = builder.evidence("baseline", where)
    assert what_ran(found) == (A100.model_copy(update={"name": "A100"}),)
    told, _ = shaped({"device": "x", "effective": 3}, ENV, "env.json")
    broken = {name: replace(one, env=told) for name, one in found.launches.items()}
    assert what_ran(replace(found, launches=broken)) == ()


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_departs_from_nothing(name: str) -> None:
    assert departures(load_profile(name), parse_settings(())) == []


# What a profile has besides `extends: a100x2_pcie4` -> what its first line says.
LESS = """
required: [preflight.torch] -> for 1 of {n} checks
config: cpu_smoke.yaml -> config changed (config=cpu_smoke.yaml)
trainer: my.train -> config changed (trainer=my.train)
workload: {seq_len: 128} -> workload changed (seq_len=128)
phases: {nvtx: {config_overrides: {model.n_layers: 1}}} -> model changed (nvtx:model.n_layers=1)
env: {NCCL_ALGO: null} -> settings changed (NCCL_ALGO unset)
env: {NSA_SEL_RANGES_V2: {value: "0", source: me}} -> settings changed (NSA_SEL_RANGES_V2=0)
phases: {baseline: {steps: 7, source: me}} -> fewer steps (baseline.steps=7)
phases: {baseline: {launches: 1, source: me}} -> fewer steps (baseline.launches=1)
limits: {throughput: {value: 1, source: me}} -> limits loosened (throughput)
limits: {memory_gib: {value: 99, source: me}} -> limits loosened (memory_gib)
limits: {throughput: {value: 39, source: me, gated: false}} -> limits loosened (throughput)
"""


@pytest.mark.parametrize("case", LESS.strip().splitlines())
@pytest.mark.parametrize("name", ["mine", "a100x2_pcie4"])
def test_a_profile_that_asks_for_less_says_so(tmp_path: Path, name: str, case: str) -> None:
    """Also under the shipped profile's own name, and with its title."""
    text, said = case.split(" -> ")
    path = written(tmp_path, f"extends: a100x2_pcie4\nname: {name}\n{text}\n")
    found = departures(load_profile(path), parse_settings(()))
    assert found == [said.replace("{n}", str(len(load_profile("a100x2_pcie4").required)))]


def test_a_scope_cannot_be_typed(tmp_path: Path) -> None:
    path = written(tmp_path, 'extends: cpu\nname: mine\nscope: "2xA100 PCIe4"\n')
    with pytest.raises(UsageError, match="scope: leave it out"):
        load_profile(path)
