"""What all records share: frozen, keyword-only, and closed to unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Record"]


class Record(BaseModel):
    """An immutable record; an unknown field is an error, so a schema cannot drift unseen."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings"
    )
