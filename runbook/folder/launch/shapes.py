"""Shapes of JSON documents: what does not have the type that its readers expect is left out.

A trainer, or whoever edited its files, may write anything. Left out and named, a value is missing
for every reader alike, and no reader has to ask for its type. `shapes.yaml` has the shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from nsa.strict_yaml import shipped

_DIGEST = re.compile(r"[0-9a-fA-F]{1,16}")
# Above this a whole number is no count of anything; 2^64 - 1 is the largest sum that is kept.
LARGEST_COUNT = 2**64


def is_count(value: object) -> bool:
    """A whole number that fits into 64 bits; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_COUNT


def is_any_number(value: object) -> bool:
    """A number, NaN and infinities included."""
    return isinstance(value, float) or is_count(value)


def is_number(value: object) -> bool:
    """A finite number."""
    return is_any_number(value) and math.isfinite(value)  # type: ignore[arg-type]


def is_text(value: object) -> bool:
    """A string."""
    return isinstance(value, str)


def is_digest(value: object) -> bool:
    """A 64-bit number in hexadecimal."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


# A kind, a list with the shape of its items, or a mapping: of fields, each with its own shape, or
# of any names (`*`) to values of one shape.
Shape = str | list[Any] | dict[str, Any]
_EACH = "*"
_KINDS: Mapping[str, Callable[[object], bool]] = {
    "text": is_text,
    "flag": lambda value: isinstance(value, bool),
    "count": is_count,
    "number": is_any_number,
    "finite": is_number,
    "digest": is_digest,
    # Only shown, or compared as it stands.
    "anything": lambda _: True,
    "mapping": lambda value: isinstance(value, Mapping),
}


def shape_of(document: str) -> dict[str, Any]:
    """The shape of a document, by the name that evidence has for it."""
    shape: dict[str, Any] = shipped(Path(__file__).with_suffix(".yaml"))[document]
    return shape


_NOTHING = object()


def shaped(
    document: Mapping[str, Any], shape: Shape, where: str
) -> tuple[dict[str, Any], list[str]]:
    """The document without what has another shape, and one sentence for each part left out.

    A null fits a field: it says that nothing is known. In a list, and where names have values of
    one shape, a single other value spoils all of it.
    """
    problems: list[str] = []
    fitted: dict[str, Any] = _fit(document, shape, where, problems)
    return fitted, problems


def _fit(value: Any, shape: Shape, where: str, problems: list[str]) -> Any:
    if value is None:
        return None
    if isinstance(shape, str) and _KINDS[shape](value):
        return value
    if isinstance(shape, list) and isinstance(value, list):
        items = [_fit(one, shape[0], where, problems) for one in value]
        return _NOTHING if _spoiled(items, where, problems) else items
    if isinstance(shape, dict) and isinstance(value, Mapping):
        inner: dict[str, Any] = dict.fromkeys(value, shape[_EACH]) if _EACH in shape else shape
        fitted = {
            name: _fit(value[name], one, f"{where}.{name}", problems)
            for name, one in inner.items()
            if name in value
        }
        if _EACH in shape:
            return _NOTHING if _spoiled(fitted.values(), where, problems) else fitted
        return {name: one for name, one in {**value, **fitted}.items() if one is not _NOTHING}
    problems.append(f"{where} has an unexpected value: {str(value)[:40]!r}")
    return _NOTHING


def _spoiled(items: Collection[Any], where: str, problems: list[str]) -> bool:
    """Does one item leave out all of them? A null among them has not been told yet."""
    if any(one is None for one in items):
        problems.append(f"{where} holds a null")
    return any(one is _NOTHING or one is None for one in items)
