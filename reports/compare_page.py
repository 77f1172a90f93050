"""Two runs side by side, as one page."""

from __future__ import annotations

from reports.templating import template_environment
from runbook.tools.compare import Comparison, metric_text


def render_comparison(found: Comparison) -> str:
    """Return the comparison as HTML: offline, without script, escaped."""
    template = template_environment(html=True).get_template("compare.html.j2")
    changed = [check for check in found.checks if check.changed]
    return template.render(found=found, changed=changed, metric_text=metric_text)
