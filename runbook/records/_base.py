"""What all records share: frozen, keyword-only, and closed to unknown fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

__all__ = ["Cell", "Record", "Scalar"]

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _number_of_word(value: object) -> object:
    """JSON has no NaN: it is stored as a word, and must come back as the number it was."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


Scalar = Annotated[float | str | bool, BeforeValidator(_number_of_word)]
Cell = Annotated[str | float | int | None, BeforeValidator(_number_of_word)]


class Record(BaseModel):
    """An immutable record; an unknown field is an error, so a schema cannot drift unseen."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings"
    )
