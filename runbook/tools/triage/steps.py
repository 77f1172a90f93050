"""The changes that triage tries, as data: those for a failure, and those for low throughput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nsa.contract import NSAError
from nsa.toggles import TOGGLES, Value
from runbook.records import Launch
from runbook.records.launch import with_option

PARITY_ARGV = (
    "python", "-m", "pytest", "-q", "--pyargs", "nsa.tests.test_selection_v2_equiv",
    "-k", "equivalence_various_patterns",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TriageStep:
    """One change to the failing command. `set` and `unset` are environment variables.

    `single` runs one process without DDP. `parity` runs the parity tests beside it. `always` runs
    it although it changes no setting (another port is another attempt).
    """

    name: str
    title: str
    source: str
    set: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    single: bool = False
    parity: bool = False
    always: bool = False

    def changes(self, launch: Launch) -> bool:
        """Does it change anything about this launch?

        A value that a toggle has anyway is no change: run all the same, it could be called the
        cure of a failure that comes and goes.
        """
        now = {name: _value(name, launch.env) for name in (*self.set, *self.unset)}
        then = {name: _value(name, self.set) for name in now}
        return now != then or self.always or (self.single and launch.nproc > 1)

    def exports(self) -> list[str]:
        """Lines for a shell that apply it."""
        lines = [f"export {name}={value}" for name, value in self.set.items()]
        return [*lines, *(f"unset {name}" for name in self.unset)]


def _value(name: str, env: Mapping[str, str]) -> Value:
    """What a variable means here: a toggle that is not given has its default."""
    text, toggle = env.get(name), TOGGLES.get(name)
    if toggle is None:
        return text
    try:
        return toggle.default if text is None else toggle.parse(text)
    except NSAError:
        return text


_FAILURE = (
    TriageStep(
        name="compression_off",
        title="compression off, larger buckets",
        source="requirement T5",
        set={"NSA_DDP_COMPRESS": "off", "NSA_DDP_BUCKET_MB": "100"},
    ),
    TriageStep(
        name="static_graph_off",
        title="static graph off, unused parameters not searched",
        source="requirement T6",
        set={"NSA_DDP_STATIC_GRAPH": "0", "NSA_DDP_FIND_UNUSED": "0"},
    ),
    TriageStep(
        name="find_unused",
        title="search for unused parameters",
        source="requirement T6",
        set={"NSA_DDP_FIND_UNUSED": "1"},
    ),
    TriageStep(
        name="nccl_debug",
        title="another port, NCCL_DEBUG=INFO for a short window",
        source="requirement T7",
        set={"NCCL_DEBUG": "INFO"},
        always=True,
    ),
    TriageStep(
        name="sdpa_no_flash",
        title="attention without the flash kernel",
        source="requirement T14",
        set={"NSA_SDPA_NO_FLASH": "1"},
        unset=("NSA_SDPA_FLASH_ONLY",),
    ),
    TriageStep(
        name="v2_off",
        title="selection ranges v1, with the parity tests",
        source="requirement T3",
        set={"NSA_SEL_RANGES_V2": "0"},
        parity=True,
    ),
    TriageStep(
        name="fused_unset",
        title="optimizer without the fused kernel",
        source="requirement T4",
        unset=("NSA_OPT_FUSED",),
    ),
    TriageStep(
        name="single_gpu",
        title="one process, no DDP, to continue progress",
        source="requirement T8",
        single=True,
    ),
)

_THROUGHPUT = (
    TriageStep(
        name="bucket_50",
        title="buckets of 50 MiB",
        source="requirement T1",
        set={"NSA_DDP_BUCKET_MB": "50"},
    ),
    TriageStep(
        name="flash_allowed",
        title="flash kernel not disabled",
        source="requirement T1",
        unset=("NSA_SDPA_NO_FLASH",),
    ),
    TriageStep(
        name="tracing_off",
        title="no NVTX, no TensorBoard, no audit",
        source="requirement T1",
        set={"NSA_NVTX": "0", "NSA_TB_DISABLE": "1", "NSA_SDPA_AUDIT": "0"},
    ),
    TriageStep(
        name="aux_stats_off",
        title="no auxiliary statistics",
        source="requirement N1",
        set={"NSA_DISABLE_AUX_STATS": "1"},
    ),
)

STEPS: dict[str, tuple[TriageStep, ...]] = {"failure": _FAILURE, "throughput": _THROUGHPUT}


def applied(step: TriageStep | None, launch: Launch, *, name: str, steps: int) -> Launch:
    """The launch with one step's change, or as it is (`step` None), for `steps` steps."""
    env, argv, nproc = dict(launch.env), list(launch.argv), launch.nproc
    if step is not None:
        for variable in step.unset:
            env.pop(variable, None)
        env.update(step.set)
        if step.single:
            argv, nproc = _single(argv), 1
            env = {k: v for k, v in env.items() if not k.startswith(("NSA_DDP_", "NCCL_"))}
    return launch.model_copy(
        update={
            "name": name,
            "phase": "triage",
            "argv": tuple(with_option(argv, "--steps", str(steps))),
            "env": env,
            "run_dir": name,
            "nproc": nproc,
            "steps": steps,
            "schedule": None,
            "purpose": step.title if step else "the failing command as it was",
        }
    )


def _single(argv: list[str]) -> list[str]:
    """The same trainer in one process: torchrun and its options become python."""
    if argv[0] != "torchrun":
        return argv
    rest = argv[argv.index("-m") :] if "-m" in argv else argv[1:]
    return with_option(["python", *rest], "--ddp", "0")
