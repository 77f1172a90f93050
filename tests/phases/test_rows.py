"""Each row, made to say each thing that it can say, by one change of healthy evidence.

rows/*.yaml holds the cases: of one or several rows what is changed, and what they then say. `says`
is an outcome with its reason's code, and words of the sentence. `profile`, `context`, `only`
(launches) and `speed` say whose evidence it is, `baseline` at which rates that phase's launches
ran, `accepted` which runs were before this one, `facts` what preflight found, `set` what stands at
a place of the evidence; any other key is a way to spoil it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from runbook.records import LaunchStatus, Outcome, RankExit, Reason
from runbook.records.evidence import Fact, PhaseEvidence
from tests import said
from tests.phases import builder, spoil, traces
from tests.phases.answers import WHERE, says

# What a case tells; all else spoils.
TOLD = {
    "rows", "cases", "says", "remedy", "evidence", "value", "profile", "context", "only", "speed",
    "facts", "baseline", "accepted", "set",
}  # fmt: skip


def listed() -> list[Any]:
    """Every row of every case, with all that is said of it."""
    found = []
    for file in sorted(Path(__file__).with_name("rows").glob("*.yaml")):
        for block in yaml.safe_load(file.read_text("utf-8")):
            for number, case in enumerate(block["cases"], 1):
                for row in block["rows"].split():
                    name = f"{row}-{block.get('profile', case.get('profile', ''))}{number}"
                    found.append(pytest.param(row, {**block, **case}, id=name))
    return found


def drifting(by: float) -> spoil.Change:
    """Steps that take ever longer, at last so many times as long."""
    return spoil.slower(lambda table: np.linspace(1.0, by, len(table)))


def pausing(every: int, by: float) -> spoil.Change:
    """One of so many steps takes so many times as long."""
    return spoil.slower(lambda table: np.where(np.arange(len(table)) % every == every - 1, by, 1.0))


def growing(rank: int, by: float) -> spoil.Change:
    """Memory of a rank that grows by so many MiB in each step."""
    return spoil.steps_of(rank, mem_mib=lambda table: 30_000.0 + by * table["step"])


def shifted(first: int, by: int) -> spoil.Change:
    """Another number for all steps from this one on."""
    return spoil.columns(step=lambda table: table["step"] + by * (table["step"] >= first))


def failed(row: str, *told: str) -> spoil.Change:
    """Of a row's tests these modules' failed, with the topic that each tells; one passed."""

    def change(cases: Any) -> Any:
        others = tuple(c for c in cases if f"test_{row}" not in c.classname)
        one = next(c for c in cases if f"test_{row}" in c.classname)
        broken = []
        for module, *topic in (words.split() for words in told):
            told_too = {**one.properties, **({"topic": topic[0]} if topic else {})}
            where = f"nsa.tests.{module}"
            broken.append(replace(one, classname=where, status="failed", properties=told_too))
        return (*others, replace(one, name="test_another"), *broken)

    return lambda made: spoil.at("junit.cases", change)(made) if made.junit else made


def as_fast(what: str, share: float, *ranks: int) -> spoil.Change:
    """These ranks, or all, reach this share of what the document says, in its three sources."""

    def slower(one: dict[str, Any]) -> dict[str, Any]:
        seconds = [second / share for second in one["seconds"]]
        rate = one["rate"] * share
        return {**one, "seconds": seconds, "host_s": one["host_s"] / share, "rate": rate}

    return spoil.both(*(spoil.at(f"ceilings.ranks.{rank}.{what}", slower) for rank in ranks or "*"))


def resized(what: str, share: float) -> spoil.Change:
    """Calls of this share of the size, in as much less time, so that the rate stays."""
    key, power = ("size", 3) if what == "matmul" else ("bytes", 1)

    def shorter(one: dict[str, Any]) -> dict[str, Any]:
        seconds = [second * share**power for second in one["seconds"]]
        host_s = one["host_s"] * share**power
        return {**one, key: int(one[key] * share), "seconds": seconds, "host_s": host_s}

    return spoil.at(f"ceilings.ranks.*.{what}", shorter)


def loss(*first: float) -> spoil.Change:
    """Losses of the first steps; the last one stays."""
    return spoil.columns(loss=lambda t: [*first, *first[-1:] * len(t)][: len(t)])


WAYS: dict[str, Any] = {
    "without_effect": spoil.without_effect,
    "without_rank_1": lambda: spoil.without_rank_1,
    "ended": lambda status, **more: spoil.ended(LaunchStatus(status), **more),
    "cell": spoil.cell,
    "column": lambda name, value: spoil.columns(**{name: value}),
    "jitter": spoil.jitter,
    "lost": lambda rank: spoil.at("ranks", lambda ranks: ranks[:rank]),
    "audit": lambda **found: spoil.parts(audit=traces.audit({**traces.AUDIT, **found})),
    "bad_gates": lambda first, last: spoil.at(
        "gates.entropy", lambda t: t["entropy"].mask((t.index >= first) & (t.index < last), 0.05)
    ),
    "gates_without": lambda first, last: spoil.at("gates", lambda t: t.drop(t.index[first:last])),
    "gates_lack": lambda name: spoil.at("gates", lambda table: table.drop(columns=name)),
    "same_data": lambda: lambda made: spoil.steps_of(1, data=made.ranks[0].steps["data"])(made),
    "first_read": lambda rank, digest: spoil.steps_of(
        rank, data=lambda table: [digest, *table["data"][1:]]
    ),
    "later": lambda name: spoil.columns(
        **{name: lambda table: table[name].where(table.index < 1, table[name] * 1.01)}
    ),
    "exits": lambda *ranks: spoil.result(ranks=tuple(RankExit(**rank) for rank in ranks)),
    "worse": lambda arm, by: spoil.columns(
        loss=lambda table: table["loss"] + by * (table["arm"] == arm)
    ),
    "worse_once": lambda arm, by: spoil.columns(
        loss=lambda table: table["loss"] + by * (table["arm"] == arm) * (table["block"] == 1)
    ),
    "no_cpu_time": lambda: spoil.at("ranks.*.steps", lambda steps: steps.drop(columns="cpu_s")),
    "drifting_loss": lambda by: spoil.columns(loss=lambda table: 5.5 + by * table["step"]),
    **{
        way.__name__: way
        for way in (drifting, pausing, growing, shifted, failed, as_fast, resized, loss)
    },
}


def changed(case: dict[str, Any]) -> spoil.Change:
    """The case's ways in their order, and what is set."""
    ways = [
        WAYS[name](**how) if isinstance(how, dict) else WAYS[name](*how)
        for name, how in case.items()
        if name not in TOLD
    ]
    return spoil.both(*ways, *(spoil.at(*one) for one in case.get("set", {}).items()))


def with_facts(found: PhaseEvidence, told: dict[str, Any]) -> PhaseEvidence:
    """The same in a run whose preflight found these."""
    known = dict(found.facts) or builder.facts()
    for name, value in told.items():
        like: Fact = known.get(name, known["gpu.count"])
        known[name] = replace(like, name=name, value=value)
    return replace(found, facts=known)


@pytest.mark.parametrize(("row", "case"), listed())
def test_what_a_row_says(row: str, case: dict[str, Any]) -> None:
    where = builder.context(case.get("profile", "a100x2_pcie4"), **case.get("context", {}))
    phase, what = row.split(".")
    found = builder.evidence(
        phase, where, change=changed(case), only=case.get("only"), **case.get("speed", {})
    )
    assert set(case.get("only", found.launches)) & set(found.launches), "no such launch"
    if rates := case.get("baseline"):
        found = replace(found, earlier=builder.baseline_at(*rates))
    if "accepted" in case:
        found = replace(found, accepted=builder.accepted(found, **case["accepted"]))
    if "facts" in case:
        found = with_facts(found, case["facts"])
    wanted, *words = case["says"]
    told = {name: case[name] for name in ("remedy", "evidence") if name in case}
    check = builder.row(phase, what, found, where)
    says(check, wanted, *words, **told)
    assert "value" not in case or check.measurement.value == pytest.approx(case["value"], rel=1e-3)
    # What is required and was skipped keeps the run from GO, but where nothing was accepted yet.
    skipped = check.outcome is Outcome.SKIPPED and check.code is not Reason.NO_ACCEPTED_RUN
    wrong = check.outcome not in (Outcome.PASS, Outcome.SKIPPED) or (check.required and skipped)
    assert bool(check.rerun) is wrong
    assert check.remedy or check.code is not Reason.WARNING


def test_another_number_or_word_than_was_accepted_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = builder.row("baseline", "throughput", builder.evidence("baseline", WHERE), WHERE)
    measured = check.measurement.model_copy(update={"n": check.measurement.n + 1})
    others = ({"reason": f"{check.reason}!"}, {"measurement": measured}, {"clue": "other"})
    monkeypatch.setattr(said, "FOLDER", tmp_path)
    for accepts, one in ((True, check), (False, check), *((False, one) for one in others)):
        monkeypatch.setattr(said, "_ACCEPT", accepts)
        monkeypatch.setattr(said, "_kept", {})
        monkeypatch.setattr(said, "_asked", Counter())
        if one is check:
            said.hold(check)
            continue
        with pytest.raises(AssertionError, match="SAID=accept python -m pytest -n0 tests/phases/"):
            said.hold(check.model_copy(update=one))
