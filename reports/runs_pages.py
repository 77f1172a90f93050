"""The pages about several runs: all with each number's trend as a small drawing, or two compared.

Both are offline and without script.
"""

from __future__ import annotations

from urllib.parse import quote

from markupsafe import Markup, escape

from reports.text import one_line, template_environment
from runbook.records.measurement import plain_number
from runbook.tools.compare import Comparison, metric_text
from runbook.tools.history import RunsPage, Trend

_WIDTH, _HEIGHT, _EDGE = 240.0, 44.0, 4.0
_MOST_POINTS = 60


def render_runs(page: RunsPage) -> str:
    """Return the page of all runs as HTML: escaped, filtered by profile with style rules alone."""
    profiles = tuple(dict.fromkeys(run.profile or "-" for run in reversed(page.runs)))
    return (
        template_environment(html=True)
        .get_template("runs.html.j2")
        .render(
            runs=tuple(reversed(page.runs)),
            links={folder: quote(link) for folder, link in page.links.items()},
            trends=page.trends,
            profiles=profiles,
            spark=spark,
            change=newest_change,
        )
    )


def render_comparison(found: Comparison) -> str:
    """Return two runs side by side as HTML, escaped."""
    template = template_environment(html=True).get_template("compare.html.j2")
    changed = [check for check in found.checks if check.changed]
    return template.render(found=found, changed=changed, metric_text=metric_text)


def newest_change(trend: Trend) -> str:
    """How the newest value stands to the median of the earlier ones; a dash if it cannot."""
    found = next((one for one in reversed(trend.changes()) if one is not None), None)
    return "-" if found is None else f"{found[0]:+.1%} against the median of {found[1]}"


def spark(trend: Trend) -> Markup:
    """The newest values of a trend from left to right, the limit as a broken line if it is near.

    A limit is near where drawing it leaves the values half of the height.
    """
    values = [value for value in trend.numbers[-_MOST_POINTS:] if abs(value) < 1e100]
    if len(values) < 2:
        return Markup("")
    low, high = min(values), max(values)
    bound = next((row.limit for row in reversed(trend.rows) if row.limit is not None), None)
    near = bound is not None and max(high, bound) - min(low, bound) <= 2 * (high - low)
    if near and bound is not None:
        low, high = min(low, bound), max(high, bound)

    def y(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(_HEIGHT - _EDGE - share * (_HEIGHT - 2 * _EDGE), 1)

    step = (_WIDTH - 2 * _EDGE) / (len(values) - 1)
    points = [(round(_EDGE + index * step, 1), y(value)) for index, value in enumerate(values)]
    path = " ".join(f"{x},{height}" for x, height in points)
    title = escape(one_line(f"{trend.name}: {len(values)} runs, newest {plain_number(values[-1])}"))
    line = (
        f'<line class="limit" x1="0" x2="{_WIDTH:g}" y1="{y(bound)}" y2="{y(bound)}"/>'
        if near and bound is not None
        else ""
    )
    last = points[-1]
    return Markup(  # noqa: S704 - numbers of ours, and an escaped title
        f'<svg class="spark" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img">'
        f'<title>{title}</title>{line}<polyline class="curve" fill="none" points="{path}"/>'
        f'<circle class="dot" cx="{last[0]}" cy="{last[1]}" r="3"/></svg>'
    )
