"""What the phases share: rows that cannot vanish, launches, and the guards on evidence.

The tables beside the modules have questions, remedies, and rules that never change. Every limit of
the shipped phases is declared once in `limits.yaml`; profiles give the values. A new one is one
entry there, its name in the `limits` of the phase that reads it, and one line in
`configs/machines/gpu.yaml` or, from the data sheet, in `runbook.config.load`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nsa.strict_yaml import shipped
from runbook.config import IDLE_MFU, MOST_OF_PEAK, FixedRule, LimitSpec  # noqa: F401


def table(name: str) -> dict[str, Any]:
    """The document `NAME.yaml`, read once."""
    found: dict[str, Any] = shipped(Path(__file__).with_name(f"{name}.yaml"))
    return found


@cache
def spec(name: str) -> LimitSpec:
    """The limit of this name."""
    said = {"name": name, "unit": "", **table("limits")[name]}
    return TypeAdapter(LimitSpec).validate_python(said)


def specs(*names: str) -> tuple[LimitSpec, ...]:
    """These limits, in this order."""
    return tuple(map(spec, names))


# -- the same on every machine: physics, and error rates fixed in the code -------------------------

# A fresh model predicts about uniformly, so its first loss is near ln(vocabulary). Wide enough for
# any sane initialization, narrow enough to see a resumed or a wrong model.
START_TOLERANCE = 0.15
# A cross-entropy is never negative, and a model that does worse than this many times ln(vocabulary)
# is no model: such a row was not measured.
LOSS_MOST = 10.0
# The same weights and the same rows, in two batch shapes: only rounding differs.
FIRST_LOSS_TOLERANCE = 0.002
# Least slack under the loss floor, in nats: sampling noise of a mean over a window.
FLOOR_SLACK = 0.01
# toks_per_s is written with finite digits.
RATE_TOLERANCE = 0.01
# Half-width of what one more baseline launch may give: the worst launch-to-launch noise of a
# healthy machine, so that three lucky launches do not make every later one invalid.
CONTROL_LEAST = 0.05
# Smaller matrices do not fill these cards, and smaller copies stay in their caches (L2: 40 MB of an
# A100, 50 MB of an H100 or H200, by the data sheets).
LEAST_MATRIX, LEAST_COPY_MIB = 4096, 256
# Cards of one kind differ by some percent in what they reach. One that falls this far behind
# another holds all ranks back, and no scaling shows it where it is GPU 0, which runs alone too.
CARDS_ALIKE = 0.85
# Clocks of nodes: one of NTP is right within milliseconds, and lateness of 20 ms is told.
CLOCKS_APART_S = 1.0
CLOCKS_EXACT_S = 0.02
# A card sold as 80 GB shows a little less than 80 GiB.
MEMORY_SHARE = 0.95
# More retries than this lower the bandwidth of a link: NVIDIA DCGM, dcgm_gpu_hardware_limits.h, the
# largest rate recommended. A launch under a minute may have as many as one of a minute.
PCIE_REPLAYS_PER_MINUTE = 8
# Documents about a launch's GPUs and kernel tell whole seconds, and are written right before it
# starts and right after it ends: all their questions together may take 50 s.
TAKEN_EARLY_S, TAKEN_LATE_S = 2.0, 60.0
# A thermal or power slowdown in more of the samples than this changes the mean pace.
THROTTLED_SHARE = 0.05
# A power limit under this share of the card's own was set by somebody, and holds its clocks down.
POWER_LEAST = 0.95
# Choice: at its own power limit a dense load costs a card some of its highest clock, and never this
# much. Only samples of a GPU that works count: resting, it has a low clock by right.
CLOCK_LEAST, WORKING_PERCENT = 0.60, 50.0
# A process of somebody else that is seen once may have been about to end.
OTHERS_SAMPLES = 2
# Shared memory for NCCL between processes, and for the batches of loaders: under it, both fail.
SHM_LEAST_GIB = 1.0
# Of the processors: work of others that takes this much shows in a host-bound trainer's pace.
BUSY_SHARE = 0.5
# Of all CPUs, over a timed launch: what others take shows in the times from about here on.
OTHER_WORK_SHARE = 0.2
# Token-by-token prefill hung at this step (E1), so a loss counts from the next one.
SEQUENTIAL_HANG_STEP = 5
# The same steps from a checkpoint: on a GPU sums are in no fixed order, so rounding differs.
RESUMED_TOLERANCE = 0.002
# What a production run keeps.
CHECKPOINTS_KEPT = 10
# From this length on, token-by-token prefill looks like a hang (E1).
LONG_SEQUENCE = 1024


def fixed_rules(phase: str) -> tuple[FixedRule, ...]:
    """What `fixed.yaml` says of a phase, with the numbers from here."""
    numbers = {name: value for name, value in globals().items() if name.isupper()}
    return tuple(
        FixedRule(**{key: text.format(**numbers) for key, text in rule.items()})
        for rule in table("fixed")[phase]
    )
