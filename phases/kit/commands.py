"""Launches as a person would type them: the documented commands, with the profile's trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from runbook.config.registry import PlanContext
from runbook.records import ArmSchedule, Launch
from runbook.records.launch import DATASET_FLAG, torchrun
from runbook.records.own_trainer import for_own
from runbook.stats import balanced_rounds

# The harness reads its numbers from training.csv, so it is never switched off in a phase.
_CSV_OFF = "NSA_DISABLE_CSV_LOGS"


def scaled(steps: int, context: PlanContext) -> int:
    """Steps after `--steps-scale`, at least 1."""
    return max(1, round(steps * context.steps_scale))


# Name of the launch in which arms take turns.
INTERLEAVED = "interleaved"


def environment(
    context: PlanContext,
    phase: str,
    *,
    extra: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    ddp: bool = True,
) -> dict[str, str]:
    """Variables of a launch: profile, phase, `extra`, then `--set`, the later ones winning.

    `without` names toggles that a schedule sets per arm. One process has no use for the settings
    of DDP and NCCL.
    """
    merged = context.profile.variables | context.profile.phases[phase].variables
    merged |= {**(extra or {}), **context.toggles}
    if _CSV_OFF in merged:
        merged[_CSV_OFF] = "0"
    return {
        name: value
        for name, value in merged.items()
        if name not in without and (ddp or not name.startswith(("NSA_DDP_", "NCCL_")))
    }


def trainer_launch(
    context: PlanContext,
    *,
    phase: str,
    name: str,
    purpose: str,
    steps: int | None = None,
    env: Mapping[str, str] | None = None,
    ddp: bool = True,
    schedule: ArmSchedule | None = None,
    extra: Sequence[str] = (),
    dataset: str = "synthetic",
    **more: Any,
) -> Launch:
    """One training run: `torchrun` on all ranks, or `python` in one process without DDP.

    `steps` and `env` are those of the profile's phase unless given; `more` are other fields of the
    launch.
    """
    profile, settings = context.profile, context.profile.phases[phase]
    variables = environment(context, phase, ddp=ddp) if env is None else dict(env)
    # More steps get more time, fewer no less.
    timeout_s = settings.timeout_s * max(1.0, context.steps_scale)
    make = partial(_launch, phase, name, purpose=purpose, timeout_s=timeout_s)
    if own := profile.own_trainer:
        steps = steps or scaled(settings.steps, context)
        return make(
            kind="own",
            argv=own.argv(ranks=profile.ranks, steps=steps, alone=not ddp),
            env={**for_own(variables), **own.env},
            nproc=profile.ranks if ddp else 1,
            steps=steps,
            own=own,
        )
    named = profile.config if ddp else profile.config_single
    config = named if "/" in named else f"configs/{named}"  # as it is typed
    nodes = context.nodes
    start = torchrun(profile.ranks // nodes, nodes=nodes) if ddp else ("python",)
    total = schedule.total_steps if schedule else steps or scaled(settings.steps, context)
    argv = (
        *start,
        *("-m", profile.trainer, "--config", config),
        *(DATASET_FLAG, dataset, "--ddp", "1" if ddp else "0", "--steps", str(total)),
        *extra,
    )
    return make(
        kind="trainer",
        argv=argv,
        env=variables,
        nproc=profile.ranks if ddp else 1,
        nodes=nodes if ddp else 1,
        steps=total,
        config=config,
        config_overrides={**settings.config_overrides, **context.config_overrides},
        schedule=schedule,
        **more,
    )


def _launch(phase: str, name: str, **fields: Any) -> Launch:
    return Launch(phase=phase, name=name, run_dir=f"{phase}/{name}", **fields)


def launches_per_arm(context: PlanContext, phase: str) -> int:
    """How often the same launch is repeated: once under `--protocol single`."""
    return 1 if context.protocol == "single" else context.profile.phases[phase].launches


def repeated(
    context: PlanContext, *, phase: str, purpose: str, ddp: bool = True, named: str = "run"
) -> list[Launch]:
    """The same launch several times, or one long one under `--protocol single`.

    Each is `named` so and a number; `ddp` as in `trainer_launch`.
    """
    settings = context.profile.phases[phase]
    single = settings.single_steps if context.protocol == "single" else None
    return [
        trainer_launch(
            context,
            phase=phase,
            name=f"{named}{number}",
            steps=scaled(single or settings.steps, context),
            ddp=ddp,
            purpose=f"{purpose}, launch {number}",
        )
        for number in range(1, launches_per_arm(context, phase) + 1)
    ]


def interleaved(
    context: PlanContext,
    *,
    phase: str,
    arms: Mapping[str, Mapping[str, str]],
    purpose: str,
    without: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    shuffled: bool = True,
    ordered_first: bool = False,
) -> Launch:
    """One launch in which the arms take turns; `without` are the toggles that differ.

    The order is balanced (`balanced_rounds`), unless not `shuffled`; `ordered_first` keeps the
    first round in the arms' own order, so that the control has run before an arm that may end the
    launch. The order follows from the run's seed alone, so that a plan can be printed and repeated.
    """
    settings = context.profile.phases[phase]
    random = Random(f"{phase}:{context.seed}")  # noqa: S311 - an order, not a secret
    rounds = (tuple(arms),) * settings.rounds
    if shuffled:
        rounds = balanced_rounds(tuple(arms), settings.rounds, random, ordered_first=ordered_first)
    schedule = ArmSchedule(
        settings={arm: dict(values) for arm, values in arms.items()},
        rounds=rounds,
        steps=scaled(settings.steps, context),
        warmup_steps=settings.warmup,
    )
    return trainer_launch(
        context,
        phase=phase,
        name=INTERLEAVED,
        env={**environment(context, phase, without=without), **(extra or {})},
        schedule=schedule,
        purpose=purpose,
    )


def ceilings_launch(
    context: PlanContext, *, phase: str, name: str, purpose: str, on: tuple[int, ...] = ()
) -> Launch:
    """`nsa.ceilings` on the profile's devices, with what launches set for NCCL and CUDA.

    `on` names some of the run's nodes by their places; they are measured only if that is needed.
    """
    profile = context.profile
    many = profile.ranks > 1
    each, nodes = profile.ranks // context.nodes, len(on) or (context.nodes if many else 1)
    start = torchrun(each, nodes=nodes) if many else ("python",)
    return _launch(
        phase,
        name,
        kind="ceilings",
        argv=(*start, "-m", "nsa.ceilings", "--device", profile.hardware.device),
        env={
            name: value
            for name, value in environment(context, phase, ddp=many).items()
            if name.startswith(("NCCL_", "CUDA_", "OMP_"))
        },
        nproc=each * nodes if many else profile.ranks,
        nodes=nodes,
        on=on,
        conditional=bool(on),
        steps=0,
        timeout_s=profile.phases[phase].timeout_s,
        purpose=purpose,
    )


def pytest_launch(
    context: PlanContext,
    *,
    phase: str,
    name: str,
    modules: Sequence[str],
    purpose: str,
    select: str = "",
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Tests shipped inside `nsa.tests`, run on this machine, results as JUnit."""
    chosen = ("-k", select) if select else ()
    given = context.profile.variables
    threads = {name: value for name, value in given.items() if name.startswith("OMP_")}
    packages = tuple(f"nsa.tests.{module}" for module in modules)
    return _launch(
        phase,
        name,
        kind="pytest",
        argv=("python", "-m", "pytest", "-q", "--pyargs", *packages, *chosen),
        env={**threads, **(env or {})},
        nproc=1,
        steps=0,
        timeout_s=context.profile.phases[phase].timeout_s,
        purpose=purpose,
    )
