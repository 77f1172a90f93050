"""Two documents, value by value: in what they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value that two documents have otherwise, by its dotted key; None where one has none."""

    key: str
    one: object
    other: object


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterator[Difference]:
    """Every value that differs, in the order of the keys.

    Values are the same where JSON has the same words for them: no NaN equals itself.
    """
    for name in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(name), other.get(name)
        if json.dumps(mine, sort_keys=True) == json.dumps(theirs, sort_keys=True):
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from differences(mine, theirs, f"{prefix}{name}.")
        else:
            yield Difference(key=f"{prefix}{name}", one=mine, other=theirs)
