"""What the launcher had planned of a directory: a stop is no fault then, nor are a few steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from runbook.records import Launch, LaunchResult
from runbook.tools.inspect.types import Remark, RemarkCode


def completed(launch: Mapping[str, Any] | None, result: Mapping[str, Any] | None) -> Launch | None:
    """The launch of which the two documents say that it ended as it was planned; else None."""
    try:
        planned = Launch.model_validate((launch or {}).get("launch"))
        ended = LaunchResult.model_validate(result)
    except ValidationError:
        return None
    as_told = planned.stop is None or ended.stopped is not None
    return planned if ended.ok and as_told else None


def as_planned(remarks: Sequence[Remark]) -> Iterator[Remark]:
    """The remarks on a launch that did all that it was to do: it was not meant to have more."""
    for one in remarks:
        short = one.code is RemarkCode.WINDOW_TOO_SHORT
        yield replace(one, code=RemarkCode.PLANNED) if short else one
