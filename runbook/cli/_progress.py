"""What is known of a run while it goes on, as lines of any width: for a terminal and for a pipe."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nsa.contract import Phase
from runbook.console import cells
from runbook.launch.observer import Forecast, Pulse, Silence
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text

_GAP = "  "
_BAR_LEAST, _BAR_MOST = 10, 40
_RATES = 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = "_.-=*#"
_BUSY = {
    Phase.INIT: "starting",
    Phase.FIRST_STEP: "first step",
    Phase.EVAL: "evaluating",
    Phase.CHECKPOINT: "writing a checkpoint",
    Phase.PROFILE: "profiling",
}


class Part:
    """A piece of a line, longest wording first. What has the smallest `rank` gets its room first;
    0 is never left out.
    """

    def __init__(self, rank: int, *texts: str) -> None:
        self.rank, self.texts = rank, [text for text in texts if text]


def fit(parts: Sequence[Part], width: int) -> str:
    """As many of the parts as fit on one line of `width` columns, in their order.

    Each has the longest wording for which there is room when its turn comes; what may not be left
    out and is too wide alone is cut.
    """
    chosen: dict[int, str] = {}
    for index, part in sorted(enumerate(parts), key=lambda item: item[1].rank):
        last = [_cut(part.texts[-1], width)] if part.texts and not part.rank else []
        for text in (*part.texts, *last):
            tried = chosen | {index: text}
            if cells(_joined(tried)) <= width:
                chosen = tried
                break
    return _joined(chosen)


def _joined(chosen: Mapping[int, str]) -> str:
    return _GAP.join(text for _, text in sorted(chosen.items()))


def _cut(line: str, width: int) -> str:
    while cells(line) > width:
        line = line[:-1]
    return line.rstrip()


def bar(share: float, width: int) -> str:
    """`[####------]`, `width` columns wide."""
    inside = width - 2
    done = int(share * inside)
    return f"[{'#' * done}{'-' * (inside - done)}]"


def sparkline(rates: Sequence[float], *, blocks: str = _BLOCKS) -> str:
    """One character for each rate, from zero to the fastest: a drop by half looks like half."""
    top = max(rates, default=0.0)
    if top <= 0.0:
        return ""
    last = len(blocks) - 1
    return "".join(blocks[round(min(1.0, max(0.0, rate / top)) * last)] for rate in rates)


def percent(share: float) -> str:
    """`34 %`; never all of it, since it is told while something runs."""
    return f"{min(99, int(100 * share))} %"


def rate_text(toks_per_s: float) -> str:
    """`8 874 tok/s`."""
    return f"{toks_per_s:,.0f} {TOKENS_PER_SECOND}".replace(",", " ")


def silence_texts(silent: Sequence[Silence]) -> tuple[str, ...]:
    """`rank 1 silent 7 s (usual 0.3 s), stopped; rank 0 too`, and shorter ways to say it."""
    if not silent:
        return ()
    first, *others = silent
    short = f"rank {first.rank} silent {duration_text(round(first.silent_s))}"
    usual = f" (usual {first.usual_s:.1f} s)" if first.usual_s is not None else ""
    state = f", {first.state}" if first.state else ""
    too = f"; rank {', '.join(str(one.rank) for one in others)} too" if others else ""
    return f"{short}{usual}{state}{too}", f"{short}{usual}", short


@dataclass(kw_only=True)
class Progress:
    """What was heard last. Times are on the observer's clock."""

    began: float
    place: str = ""
    phase: str = ""
    launch: str = ""
    attempt: int = 1
    since: float = 0.0
    step: int = 0
    total: int = 0
    rate: float | None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES))
    pulse: Pulse = field(default_factory=Pulse)
    forecast: Forecast | None = None
    forecast_at: float = 0.0

    def enter(self, place: str, phase: str, now: float) -> None:
        """A phase begins, or goes on without a launch."""
        self.place, self.phase, self.launch, self.since = place, phase, "", now
        self.pulse = Pulse()

    def start(self, launch: str, attempt: int, steps: int, now: float) -> None:
        """A launch begins."""
        self.launch, self.attempt, self.since = launch, attempt, now
        self.step, self.total, self.rate, self.pulse = 0, steps, None, Pulse()
        self.rates.clear()

    def advance(self, step: int, total: int, rate: float | None) -> None:
        """The launch has done a step."""
        self.step, self.total, self.rate = step, total, rate
        if rate is not None:
            self.rates.append(rate)

    @property
    def where(self) -> str:
        """`2/9 baseline/run1`."""
        launch = f"/{self.launch}" if self.launch else ""
        return f"{self.place.strip()} {self.phase}{launch}".strip()

    def left_text(self, now: float) -> str:
        """`1 min 40 s left`, or an empty text where nothing is known."""
        if self.forecast is None or self.forecast.left_s is None:
            return ""
        left_s = round(self.forecast.left_s - (now - self.forecast_at))
        if left_s <= 0:
            return ""  # it takes longer than was expected, and nobody knows how long
        least = "over " if self.forecast.unknown else ""
        return f"{least}{duration_text(left_s)} left"

    def doing(self, now: float) -> list[Part]:
        """What the launch does now. A rate stands there only while its ranks are heard."""
        if not self.launch:
            return [Part(1, f"collecting and judging, {duration_text(round(now - self.since))}")]
        silence = silence_texts(self.pulse.silent)
        step = f"step {self.step}/{self.total}" if self.total and self.step else ""
        parts = [Part(0, *silence), Part(1, step)]
        if self.pulse.busy:
            word = _BUSY.get(Phase(self.pulse.busy), self.pulse.busy)
            parts.append(Part(2, f"{word}, {duration_text(round(self.pulse.busy_s))}"))
        elif not step:
            parts.append(Part(2, f"running, {duration_text(round(now - self.since))}"))
        elif self._all_ended:
            parts.append(Part(2, "ending"))
        elif not silence and self.rate is not None:
            parts.append(Part(2, rate_text(self.rate)))
        return parts

    @property
    def _all_ended(self) -> bool:
        return bool(self.pulse.wanted) and not self.pulse.alive

    @property
    def ranks(self) -> str:
        """`ranks 2/2`, empty for a launch without heartbeats."""
        return f"ranks {self.pulse.alive}/{self.pulse.wanted}" if self.pulse.wanted else ""

    def screen(self, width: int, now: float, *, unicode: bool) -> list[str]:
        """Two lines for a terminal: the run, and what runs now; none is wider than `width`."""
        share = self.forecast.share if self.forecast else 0.0
        again = f"(attempt {self.attempt})" if self.launch and self.attempt > 1 else ""
        so_far = f"{duration_text(round(now - self.began))} so far"
        run = [
            Part(0, self.where),
            Part(4, again),
            Part(3, bar(share, _BAR_LEAST)),
            Part(2, percent(share)),
            Part(1, self.left_text(now)),
            Part(5, so_far),
        ]
        first = fit(run, width)
        small = bar(share, _BAR_LEAST)
        room = min(_BAR_MOST, _BAR_LEAST + width - cells(first))
        doing = self.doing(now)
        moving = self.launch and not (self.pulse.silent or self.pulse.busy or self._all_ended)
        blocks = _BLOCKS if unicode else _PLAIN_BLOCKS
        spark = sparkline(list(self.rates), blocks=blocks) if moving else ""
        second = fit([*doing, Part(4, spark), Part(3, self.ranks)], width)
        return [first.replace(small, bar(share, room), 1), second]

    def line(self, now: float) -> str:
        """All of it on one line, for a pipe."""
        share = percent(self.forecast.share) if self.forecast else ""
        again = f"(attempt {self.attempt})" if self.launch and self.attempt > 1 else ""
        parts = [text for part in self.doing(now) for text in part.texts[:1]]
        words = (self.where, again, *parts, self.ranks, share, self.left_text(now))
        return _GAP.join(word for word in words if word)
