"""Make strings from a run safe to show: no control characters, and escaped for each format."""

from __future__ import annotations

import re

__all__ = ["clean", "one_line", "plain_number"]

# Terminal escapes, invisible characters and those that reverse the reading direction: none of
# them may act on the reader's screen, all of them must stay visible.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(text: str) -> str:
    """The text with every unsafe character spelled out, such as `\\x1b`; newlines and tabs stay."""
    return _UNSAFE.sub(_visible, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """The cleaned text on one line, runs of white space as one blank."""
    return " ".join(clean(text).split())


def plain_number(value: float | int | str | bool | None) -> str:
    """A cell's text: four significant digits, whole numbers from 10,000 on, yes/no for booleans."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"
    return one_line(value)
