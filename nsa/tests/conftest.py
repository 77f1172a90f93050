"""Each shipped test says in the JUnit file on which device it ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsa.tests import maths


@pytest.fixture(autouse=True)
def _told_device(record_property: Callable[[str, object], None]) -> None:
    record_property("device", str(maths.device()))
