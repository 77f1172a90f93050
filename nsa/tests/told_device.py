"""Each shipped test says in the JUnit file on which device it ran.

A plugin (`-p nsa.tests.told_device`) and no conftest.py: a launch of these tests reads nobody's
conftest.py, so that no other project has a say in them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsa.torch_env import for_good

with for_good():
    from nsa.tests import maths


@pytest.fixture(autouse=True)
def _told_device(record_property: Callable[[str, object], None]) -> None:
    record_property("device", str(maths.device()))
