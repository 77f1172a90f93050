"""Preflight: which machine, which checkout, and whether the trainer is sane, before any number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from phases import machine
from phases.kit import fixed_rules, spec, specs
from phases.kit.case import Case, broken_tests, judge_cases, report_of
from phases.kit.commands import ceilings_launch, pytest_launch
from phases.kit.finding import Finding, failed, invalid, passed
from phases.kit.measure import against
from phases.kit.playbook import playbook
from phases.kit.rows import Row, RowPhase
from phases.machine import ceilings
from phases.machine.nodes import bisection_rows, group_launches, next_launch, node_rows
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Reason, Table
from runbook.records.evidence import JUnitCase, PhaseEvidence

_SANITY = "sanity"
# What the tests of each check show, and the shipped modules that hold them: those first whose
# faults make tests of the others fail.
_SANITY_TESTS = {
    "equivalence": ("path equivalence", "test_equiv_small"),
    "group_consistency": ("group consistency", "test_group_consistency"),
    "whole_model": ("the whole model against the oracle", "test_whole_model", "test_beginning"),
    "documents": (
        "documents against their definition",
        "test_tokens",
        "test_documents",
        "test_places",
    ),
    "safeguards": (
        "stops, kept checkpoints and going on from one",
        "test_safeguards",
        "test_saves",
        "test_resumes",
    ),
}


class Preflight(RowPhase):
    """Requirements P1 to P14."""

    name = "preflight"
    order = 10
    title = "Preflight"
    source = "requirements P1 to P14"
    question = "Is this the right machine and checkout, in a state to be measured?"
    fixed = fixed_rules("preflight")
    collects = True
    guards = True
    limits = specs(
        "disk_free_gib", "disk_write_mib_s", "gpu_idle_memory_mib", "ceiling_matmul_tflops",
        "ceiling_memory_gb_s", "ceiling_host_gb_s", "ceiling_all_reduce_gb_s",
    )  # fmt: skip

    def plan(self, context: PlanContext) -> list[Launch]:
        """Sanity tests, and what the devices can do; the engine collects facts before."""
        sanity = [
            pytest_launch(
                context,
                phase=self.name,
                name=_SANITY,
                modules=[module for _, *modules in _SANITY_TESTS.values() for module in modules],
                purpose="paths agree; heads of a group read alike; model, data and stops are right",
                # Many tiny parallel regions: threads that wait for a busy core cost a minute.
                env={"OMP_NUM_THREADS": "1"},
            )
        ]
        return [
            *(() if context.profile.own_trainer else sanity),
            ceilings_launch(
                context,
                phase=self.name,
                name=ceilings.LAUNCH,
                purpose="matrix product, copies and all-reduce of the devices themselves",
            ),
            *group_launches(context, self.name),
        ]

    def needs_more(self, evidence: PhaseEvidence, context: PlanContext) -> Sequence[str]:
        """Groups of nodes are measured, one after the other, where all together fall short."""
        return next_launch(Case(phase=self.name, evidence=evidence, context=context))

    def rows(self) -> Sequence[Row]:
        """Artifacts, checkout, software, hardware, state, settings, sanity, ceilings."""
        rows = [self.row.one(what, answer) for what, answer in _ANSWERS.items()]
        return [*rows, *ceilings.ceiling_rows()]

    def asked(self, context: PlanContext) -> Sequence[Row]:
        """On nodes of a cluster also the rows about them."""
        own = (*node_rows(), *bisection_rows(context)) if context.on_nodes else ()
        return (*self.rows(), *own)

    def needed_on_nodes(self, context: PlanContext) -> tuple[str, ...]:
        """That all nodes are there and alike; where a floor decides also which one is sick."""
        floor = context.profile.limit(spec("ceiling_all_reduce_gb_s"))
        rows = (*node_rows(), *(bisection_rows(context) if floor.gated else ()))
        return tuple(f"{self.name}.{row.what}" for row in rows if context.on_nodes)

    def details(self, case: Case) -> Judgement:
        """Every fact that was found out."""
        rows = tuple(
            (
                fact.name,
                str(fact.value) if isinstance(fact.value, bool) else fact.value,
                fact.unit,
                fact.note,
                fact.path,
            )
            for fact in case.evidence.facts.values()
        )
        columns = ("fact", "value", "unit", "note", "source")
        return Judgement(
            checks=(), tables=(Table(title="Machine and checkout", columns=columns, rows=rows),)
        )


def _passed(case: Case, *, shown: str, modules: Sequence[str]) -> Finding:
    """Where tests failed, the first of them names the topic: others may have failed for it."""

    def own(test: JUnitCase) -> bool:
        return _module(test) in modules

    found = judge_cases(case, _SANITY, shown, own)
    if found.code is not Reason.TEST_FAILED:
        return found
    broken = filter(own, broken_tests(report_of(case, _SANITY).cases))
    first = min(broken, key=lambda test: modules.index(_module(test)))
    topic = first.properties.get("topic", "")
    return replace(found, topic=topic if topic in playbook().by_topic else "")


def _module(test: JUnitCase) -> str:
    return test.classname.rpartition(".")[2]


def _imports(case: Case) -> Finding:
    value = case.known("trainer.imports")
    if value.value is True:
        return passed(f"{case.profile.trainer} imports", measurement=value)
    return failed(
        Reason.CRASH, f"{case.profile.trainer} does not import: {value.note}", measurement=value
    )


def _infiniband(case: Case) -> Finding:
    value = case.known("infiniband.present")
    safe = "; NCCL_IB_DISABLE=1 is safe" if case.profile.has_gpu else ""
    return passed(f"present: {value.note}" if value.value else f"absent{safe}", measurement=value)


def _disk(case: Case, *, fact: str, limit: str, unit: str) -> Finding:
    """A slow or full disk is the environment's fault, none of the trainer's."""
    value = case.known(fact)
    beyond = partial(invalid, Reason.WRONG_ENVIRONMENT)
    return against(value, case.limit(limit), f"{float(value.value):.0f} {unit}", beyond=beyond)


def _port(case: Case) -> Finding:
    value = case.known("port.free")
    if value.value is True:
        return passed(f"{value.note or 'a port'} is free", measurement=value)
    reason = f"{value.note or 'the default port'}; launches choose a free one on their own"
    return passed(reason, measurement=value)


_ANSWERS: Mapping[str, Callable[[Case], Finding]] = {
    "artifacts": machine.artifacts,
    "branch": machine.branch,
    "sha": partial(machine.recorded, name="git.sha"),
    "clean_tree": machine.clean_tree,
    "trainer_imports": _imports,
    "torch": partial(machine.recorded, name="torch.version"),
    "cuda": machine.cuda,
    "gpus": machine.gpu_names,
    "extra_gpus": machine.extra_gpus,
    "gpu_driver": machine.driver,
    "mig": machine.mig,
    "gpu_memory": machine.gpu_memory,
    "pcie": machine.pcie,
    "nvlink": machine.nvlink,
    "infiniband": _infiniband,
    "gpu_power": machine.power_limit,
    "gpu_clean": machine.gpu_state,
    "disk_free": partial(_disk, fact="disk.free_gib", limit="disk_free_gib", unit="GiB free"),
    "disk_speed": partial(
        _disk, fact="disk.write_mib_s", limit="disk_write_mib_s", unit="MiB/s written and synced"
    ),
    "port": _port,
    "leftovers": machine.leftovers,
    "variables": machine.variables,
    "host_settings": machine.host_settings,
    "needs": machine.needs,
    "prefill": machine.sequential_prefill,
    **{
        what: partial(_passed, shown=shown, modules=modules)
        for what, (shown, *modules) in _SANITY_TESTS.items()
    },
}
