"""Writes docs/thresholds.md from the shipped profiles: `python -m tests.config.thresholds`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phases.common import ab as control
from phases.common import facts, plausible
from runbook.config import Limit, Profile, load_profile

PAGE = Path(__file__).parents[2] / "docs" / "thresholds.md"
OTHERS = ("a100x2_pcie3", "h200x1", "cpu")

_INTRO = """\
# Thresholds

Every limit that a check is held against, and where it comes from. The numbers live in
`configs/profiles/*.yaml`; this page is written from them (`python -m tests.config.thresholds`) and
a test compares the two. A requirement such as B3 is one of [the specification](spec.md); "choice"
marks a number that this program had to choose because the requirement has no figure. Limits that
are "shown" are printed and never decide; nor do those of rows that no shipped profile requires
(gpu_imbalance, loader_fetch_s).

A profile of your own says `extends: a100x2_pcie4` and only what differs; `null` drops an inherited
key. `runbook run --profile mine.yaml` uses it, `runbook judge RUN --profile mine.yaml` judges a
finished run again by it.
"""

_RULES = """\
## Decision rules

Each decision uses the numbers above at an error rate that is fixed in the code;
`docs/statistics.md` has the rates that were measured.

| question | rule | error |
|---|---|---|
| throughput reaches the floor | lower bound over at least 3 launches | one-sided 5 % |
| best bucket | beats every other arm, paired; else TIE: the configured one stays | 1 % family |
| fused AdamW | ratio above 1 - margin: KEEP; below: DROP | one-sided 5 % |
| scaling | bound of E = T_N / (N x T_1); above 1.05 is INVALID | one-sided 1 % |
| steady | slope inside the drift limit, no change point, no stall | 90 % interval |
| memory | no new high-water mark (max(64 MiB, 0.2 %)), projection | one-sided 5 % |

The production config fixes the *global* batch, so one GPU runs all of it: E compares N ranks with
one at the same global batch (strong scaling). One GPU gains from the larger batch per device, which
makes this E a cautious one. Gradient checkpointing is off on both sides, as DDP switches it off.
"""


def _number(limit: Limit) -> str:
    unit = f" {limit.unit}" if limit.unit else ""
    sign = f"{limit.comparator.value} " if limit.comparator.value else ""
    return f"{sign}{limit.value:g}{unit}" + ("" if limit.gated else " (shown)")


def _limits(profile: Profile) -> Iterator[str]:
    yield "| limit | value | source |"
    yield "|---|---|---|"
    for name, limit in profile.limits.items():
        yield f"| {name} | {_number(limit)} | {limit.source} |"


def _differences(base: Profile, other: Profile) -> Iterator[str]:
    changed = {n: limit for n, limit in other.limits.items() if limit != base.limits[n]}
    yield f"### {other.name}: {other.title}"
    yield ""
    yield "| limit | value | source |"
    yield "|---|---|---|"
    for name, limit in changed.items():
        yield f"| {name} | {_number(limit)} | {limit.source} |"
    left_out = sorted(set(base.required) - set(other.required))
    yield ""
    yield f"Not required here: {', '.join(left_out) or 'nothing less'}."
    yield ""


def _constants() -> Iterator[str]:
    yield "## Plausibility"
    yield ""
    yield "Physical limits are the same everywhere, so they are in the code, not in a profile."
    yield ""
    yield "| what | limit | why |"
    yield "|---|---|---|"
    yield "| MFU | above 0, at most 1 | more than the peak is not possible |"
    yield "| scaling | at most 1.05 | more is not possible for like runs |"
    start = f"within {plausible.START_TOLERANCE:.0%} of ln(vocabulary)"
    yield f"| first loss | {start} | a fresh model predicts about uniformly |"
    floor = f"not under the floor by more than {plausible.FLOOR_SLACK:g} nats or 4 standard errors"
    yield f"| mean loss of the last 50 steps | {floor} | below it the model sees the future |"
    yield "| tokens | steps x S x global batch x accumulation, exactly | counted, not estimated |"
    rate = f"tokens / dt_s within {plausible.RATE_TOLERANCE:.0%}"
    yield f"| toks_per_s | {rate} | the columns are written from one measurement |"
    yield "| sum of dt_s | at most the launch's duration | steps happen inside the launch |"
    least = f"99 % interval of one more baseline launch, at least {control.LEAST:.0%} wide"
    yield f"| control arm | {least} | otherwise the arms were compared under other conditions |"
    memory = f"at least {facts.MEMORY_SHARE:.0%} of the profile's"
    yield f"| GPU memory | {memory} | a card sold as 80 GB shows a little less than 80 GiB |"
    prefill = f"sequential and S >= {facts.LONG_SEQUENCE}"
    yield f"| prefill warning | {prefill} | requirement E1 |"


def page() -> str:
    """The whole page."""
    base = load_profile("a100x2_pcie4")
    lines = [
        _INTRO,
        f"## {base.name}: {base.title}",
        "",
        *_limits(base),
        "",
        "## Other profiles",
        "",
    ]
    for name in OTHERS:
        lines += _differences(base, load_profile(name))
    return "\n".join([*lines, *_constants(), "", _RULES])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
