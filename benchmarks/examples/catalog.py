"""Which runs there are: what is wrong in each, how it is started, and how it has to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A quarter of what two cores of a server do: below it something is wrong on any machine.
_FLOOR_TOK_S = 2000


@dataclass(frozen=True, kw_only=True)
class Example:
    """One run. `profile` is what differs from `extends`, or the name of a shipped profile."""

    name: str
    title: str
    wrong: str
    exit_code: int
    profile: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


EXAMPLES = (
    Example(
        name="go",
        title="a healthy machine",
        wrong="nothing",
        exit_code=0,
    ),
    Example(
        name="slow-config",
        title="a config that is too slow",
        wrong="`NSA_PREFILL_BATCHED=0`: token by token instead of the whole sequence at once, on a "
        f"profile whose floor is {_FLOOR_TOK_S} tok/s",
        exit_code=1,
        changes={
            "throughput_gated": True,
            "limits": {
                "throughput": {
                    "value": _FLOOR_TOK_S,
                    "gated": True,
                    "source": "choice, a quarter of what two cores of a server do",
                }
            },
        },
        gates=("baseline.throughput",),
        arguments=("--phase", "preflight,baseline", "--set", "NSA_PREFILL_BATCHED=0"),
    ),
    Example(
        name="hang",
        title="a rank that hangs",
        wrong="rank 1 never comes back from the backward pass of step 20",
        exit_code=1,
        changes={"trainer": "benchmarks.examples.hanging"},
        arguments=("--phase", "preflight,baseline"),
    ),
    Example(
        name="nan",
        title="a loss that is not finite",
        wrong="`train.lr=1e6`",
        exit_code=1,
        arguments=("--set", "train.lr=1e6"),
    ),
    Example(
        name="leak",
        title="memory that grows",
        wrong="rank 1 keeps half a MiB more in every step",
        exit_code=1,
        changes={"trainer": "benchmarks.examples.leaking"},
        arguments=("--phase", "preflight,long_run"),
    ),
    Example(
        name="wrong-hardware",
        title="another machine than the profile's",
        wrong="the profile of two A100s on a machine without a GPU",
        exit_code=3,
        profile="a100x2_pcie4",
    ),
)
