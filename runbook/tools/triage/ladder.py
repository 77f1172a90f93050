"""The rungs, as data: seed 004's triage of deadlocks and seed 000's failure playbook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runbook.records import Launch

PARITY_ARGV = (
    "python", "-m", "pytest", "-q", "--pyargs", "nsa.tests.test_selection_v2_equiv",
    "-k", "equivalence_various_patterns",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One change to the failing command. `set` and `unset` are environment variables.

    Those in `unset` are switches: 0 is the same as not set.
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
        """Does it change anything about this launch?"""
        changed = any(launch.env.get(name) != value for name, value in self.set.items())
        removed = any(launch.env.get(name, "0") != "0" for name in self.unset)
        return changed or removed or self.always or (self.single and launch.nproc > 1)

    def exports(self) -> list[str]:
        """Lines for a shell that apply it."""
        lines = [f"export {name}={value}" for name, value in self.set.items()]
        return [*lines, *(f"unset {name}" for name in self.unset)]


_FAILURE = (
    Rung(
        name="compression_off",
        title="compression off, larger buckets",
        source="seed 004, Triage step 1",
        set={"NSA_DDP_COMPRESS": "off", "NSA_DDP_BUCKET_MB": "100"},
    ),
    Rung(
        name="static_graph_off",
        title="static graph off, unused parameters not searched",
        source="seed 004, Triage step 2",
        set={"NSA_DDP_STATIC_GRAPH": "0", "NSA_DDP_FIND_UNUSED": "0"},
    ),
    Rung(
        name="find_unused",
        title="search for unused parameters",
        source="seed 004, Triage step 2",
        set={"NSA_DDP_FIND_UNUSED": "1"},
    ),
    Rung(
        name="nccl_debug",
        title="another port, NCCL_DEBUG=INFO for a short window",
        source="seed 004, Triage step 3; seed 000, Stability Long-Run",
        set={"NCCL_DEBUG": "INFO"},
        always=True,
    ),
    Rung(
        name="sdpa_no_flash",
        title="attention without the flash kernel",
        source="seed 000, SDPA Backend Audit; seed 002, Go/No-Go",
        set={"NSA_SDPA_NO_FLASH": "1"},
        unset=("NSA_SDPA_FLASH_ONLY",),
    ),
    Rung(
        name="v2_off",
        title="selection ranges v1, with the parity tests",
        source="seed 000, Failure Playbook: v2 issues",
        set={"NSA_SEL_RANGES_V2": "0"},
        parity=True,
    ),
    Rung(
        name="fused_unset",
        title="optimizer without the fused kernel",
        source="seed 000, Failure Playbook: optimizer instability",
        unset=("NSA_OPT_FUSED",),
    ),
    Rung(
        name="single_gpu",
        title="one process, no DDP, to continue progress",
        source="seed 004, Triage step 4",
        single=True,
    ),
)

_THROUGHPUT = (
    Rung(
        name="bucket_50",
        title="buckets of 50 MiB",
        source="seed 000, Failure Playbook: low throughput",
        set={"NSA_DDP_BUCKET_MB": "50"},
    ),
    Rung(
        name="flash_allowed",
        title="flash kernel not disabled",
        source="seed 000, Failure Playbook: low throughput",
        unset=("NSA_SDPA_NO_FLASH",),
    ),
    Rung(
        name="tracing_off",
        title="no NVTX, no TensorBoard, no audit",
        source="seed 000, Failure Playbook: low throughput",
        set={"NSA_NVTX": "0", "NSA_TB_DISABLE": "1", "NSA_SDPA_AUDIT": "0"},
    ),
    Rung(
        name="aux_stats_off",
        title="no auxiliary statistics",
        source="seed 000, NVTX Profiling",
        set={"NSA_DISABLE_AUX_STATS": "1"},
    ),
)

LADDERS: dict[str, tuple[Rung, ...]] = {"failure": _FAILURE, "throughput": _THROUGHPUT}


def applied(rung: Rung | None, launch: Launch, *, name: str, steps: int) -> Launch:
    """The launch with one rung's change, or as it is (`rung` None), for `steps` steps."""
    env, argv, nproc = dict(launch.env), list(launch.argv), launch.nproc
    if rung is not None:
        for variable in rung.unset:
            env.pop(variable, None)
        env.update(rung.set)
        if rung.single:
            argv, nproc = _single(argv), 1
            env = {k: v for k, v in env.items() if not k.startswith(("NSA_DDP_", "NCCL_"))}
    return launch.model_copy(
        update={
            "name": name,
            "phase": "triage",
            "argv": tuple(_with_option(argv, "--steps", str(steps))),
            "env": env,
            "run_dir": name,
            "nproc": nproc,
            "steps": steps,
            "schedule": None,
            "purpose": rung.title if rung else "the failing command as it was",
        }
    )


def _single(argv: list[str]) -> list[str]:
    """The same trainer in one process: torchrun and its options become python."""
    if argv[0] != "torchrun":
        return argv
    rest = argv[argv.index("-m") :] if "-m" in argv else argv[1:]
    return _with_option(["python", *rest], "--ddp", "0")


def _with_option(argv: list[str], flag: str, value: str) -> list[str]:
    words = list(argv)
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            words[index + 1] = value
            return words
        if word.startswith(f"{flag}="):
            words[index] = f"{flag}={value}"
            return words
    return [*words, flag, value]
