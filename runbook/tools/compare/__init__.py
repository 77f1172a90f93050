"""Two finished runs: what differs, whether their numbers may be compared, and what changed.

Nothing is started here; what enters are two records and the folders they came from.
"""

from __future__ import annotations

from runbook.tools.compare.runs import Comparison, compare_runs, comparison_text, metric_text

__all__ = ["Comparison", "compare_runs", "comparison_text", "metric_text"]
