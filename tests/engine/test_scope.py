"""The first line of a verdict follows from what ran and what was required, and from no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from runbook.config import load_profile, parse_settings, profile_names
from runbook.engine import RunOptions
from runbook.engine.outputs import render
from runbook.engine.plan.prepare import prepare
from runbook.engine.run import run_setup
from runbook.engine.scope import departures, scope_of, what_ran
from runbook.errors import UsageError
from runbook.launch.observer import Observer
from runbook.records import Outcome, PhaseRecord, RunRecord, Verdict
from runbook.records.run import Ran
from tests.engine.toys import Toy, setup
from tests.phases import builder

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

OTHER_MODEL = ("model.n_layers=1", "train.lr=0", "NSA_DDP_COMPRESS=off")


def record(profile: str = "a100x2_pcie4", **changed: Any) -> RunRecord:
    found = load_profile(profile)
    values: dict[str, Any] = {
        "tool_version": "0",
        "run_id": "x",
        "profile": found.name,
        "profile_sha256": "0" * 64,
        "profile_document": found.model_dump(mode="json"),
        "scope": "typed by a person",
        "verdict": Verdict.GO,
        "reasons": (),
        "started_at": "",
        "finished_at": None,
        "command": "",
        "required": found.required,
        "phases": (),
        "environment": {"gpu.pcie_gen_max": "4"},
    }
    return RunRecord(**(values | changed))


def phase(*ran: Ran) -> PhaseRecord:
    return PhaseRecord(name="baseline", title="x", source="x", outcome=Outcome.PASS, ran=ran)


def profile_file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_scope_names_the_machine_and_the_workload_that_ran() -> None:
    alone = A100.model_copy(update={"ranks": 1})
    said = scope_of(record(), [phase(A100), phase(alone)])
    assert said == (
        "2 x NVIDIA A100 80GB PCIe, PCIe 4; 78.4M parameters, S=2048, batch 2 x 2, bf16"
    )


def test_a_gpu_profile_whose_launches_ran_on_the_cpu_says_cpu() -> None:
    cpu = A100.model_copy(update={"device": "cpu", "name": "Xeon", "parameters": 460_000})
    typed = {**record().profile_document, "title": "2xA100 PCIe4"}
    said = scope_of(record(profile_document=typed), [phase(cpu)])
    assert said.startswith("2 ranks on CPU; 0.5M parameters")
    assert "A100" not in said


def test_nothing_trained_and_nothing_gated_are_told() -> None:
    assert scope_of(record(), []) == "no training ran"
    assert scope_of(record("cpu"), []).endswith("function only, throughput not gated")
    fewer = record(required=("preflight.torch",))
    assert scope_of(fewer, [phase(A100)]).endswith("function only, throughput not gated")


def test_what_ran_is_read_from_env_json() -> None:
    where = builder.context()
    found = builder.evidence("baseline", where)
    assert what_ran(found) == (A100.model_copy(update={"name": "A100"}),)
    broken = {
        name: replace(one, env={"device": "x", "effective": 3})
        for name, one in found.launches.items()
    }
    assert what_ran(replace(found, launches=broken)) == ()


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_departs_from_nothing(name: str) -> None:
    assert departures(load_profile(name), parse_settings(())) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("required: [preflight.torch]", "for 1 of {n} checks"),
        ("config: cpu_smoke.yaml", "config changed (config=cpu_smoke.yaml)"),
        ("trainer: my.train", "config changed (trainer=my.train)"),
        ("workload: {seq_len: 128}", "workload changed (seq_len=128)"),
        (
            "phases: {baseline: {config_overrides: {model.n_layers: 1}}}",
            "model changed (baseline:model.n_layers=1)",
        ),
        ("env: {NCCL_ALGO: null}", "settings changed (NCCL_ALGO unset)"),
        (
            'env: {NSA_SEL_RANGES_V2: {value: "0", source: me}}',
            "settings changed (NSA_SEL_RANGES_V2=0)",
        ),
        (
            "phases: {baseline: {launches: 1, steps: 7, source: me}}",
            "fewer steps (baseline.steps=7, baseline.launches=1)",
        ),
        ("limits: {throughput: {value: 1, source: me}}", "limits loosened (throughput)"),
        ("limits: {memory_gib: {value: 99, source: me}}", "limits loosened (memory_gib)"),
        (
            "limits: {throughput: {value: 39, source: me, gated: false}}",
            "limits loosened (throughput)",
        ),
    ],
)
@pytest.mark.parametrize("name", ["mine", "a100x2_pcie4"])
def test_a_profile_that_asks_for_less_says_so(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """Also under the shipped profile's own name, and with its title."""
    path = profile_file(tmp_path, f"extends: a100x2_pcie4\nname: {name}\n{text}\n")
    found = departures(load_profile(path), parse_settings(()))
    assert found == [said.format(n=len(load_profile("a100x2_pcie4").required))]


def test_a_stricter_limit_and_another_check_are_no_departure(tmp_path: Path) -> None:
    strict = "limits: {throughput: {value: 99999, source: me}, memory_gib: {value: 9, source: me}}"
    path = profile_file(tmp_path, f"extends: a100x2_pcie4\nname: mine\n{strict}\n")
    assert departures(load_profile(path), parse_settings(())) == []


def test_settings_that_change_model_or_training_are_told() -> None:
    assert departures(load_profile("cpu"), parse_settings(OTHER_MODEL)) == [
        "model changed (model.n_layers=1)",
        "config changed (train.lr=0)",
        "settings changed (NSA_DDP_COMPRESS=off)",
    ]


def test_a_scope_cannot_be_typed(tmp_path: Path) -> None:
    path = profile_file(tmp_path, 'extends: cpu\nname: mine\nscope: "2xA100 PCIe4"\n')
    with pytest.raises(UsageError, match="scope: leave it out"):
        load_profile(path)


def run(out: Path, *phases: Toy, **changed: Any) -> RunRecord:
    return run_setup(setup(out, *phases, **changed), observer=Observer())


@pytest.mark.parametrize(
    ("words", "scale", "said"),
    [
        ((), 0.5, "steps x 0.5"),
        (
            OTHER_MODEL,
            1.0,
            "model changed (model.n_layers=1), config changed (train.lr=0), "
            "settings changed (NSA_DDP_COMPRESS=off)",
        ),
    ],
)
def test_the_first_line_says_it_in_every_format(
    tmp_path: Path, words: tuple[str, ...], scale: float, said: str
) -> None:
    wanted = setup(tmp_path, Toy("baseline"), steps_scale=scale)
    made = run_setup(replace(wanted, settings=parse_settings(words)), observer=Observer())
    total = len(load_profile("cpu").required)
    head = f"GO for 1 of {total} checks, {said} ("
    assert made.verdict is Verdict.GO and made.headline.startswith(head)
    written = {name: render(made, name) for name in ("terminal", "md", "html", "junit")}
    assert f"**Verdict: {head}" in written["md"]
    assert any(line.startswith(head) for line in written["terminal"].splitlines())
    caveat = f'<span class="caveat">for 1 of {total} checks, {said}</span></h1>'
    assert f'<span class="word">GO</span> {caveat}' in written["html"]
    case = ElementTree.fromstring(written["junit"]).find(".//testcase[@name='verdict']")
    assert case is not None and (case.findtext("system-out") or "").startswith(head)


EXTRA: Mapping[str, tuple[tuple[str, ...], Verdict]] = {
    "fails": (("--fault", "exit7"), Verdict.NO_GO),
    "passes": ((), Verdict.GO),
}


@pytest.mark.parametrize("how", EXTRA)
def test_a_phase_that_was_asked_for_by_name_counts_whole(tmp_path: Path, how: str) -> None:
    """The profile requires nothing of it; before, its failure was no reason against GO."""
    words, verdict = EXTRA[how]
    wanted = setup(tmp_path, Toy("baseline"), phases="baseline,extra")
    asked = replace(wanted, phases=(*wanted.phases, Toy("extra", words=words)))
    made = run_setup(asked, observer=Observer())
    assert made.verdict is verdict
    assert all(check.required for check in made.checks())


def test_fineweb_counts_only_where_it_is_asked_for() -> None:
    named = prepare(RunOptions(profile="cpu", phases="all,fineweb"))
    assert "fineweb.progress" in named.required
    assert not any(name.startswith("fineweb.") for name in named.profile.required)
    assert prepare(RunOptions(profile="cpu")).required == named.profile.required
