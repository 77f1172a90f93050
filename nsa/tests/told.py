"""Each shipped test says in the JUnit file on which device it ran, and what it is about.

A plugin (`-p nsa.tests.told`) and no conftest.py: a launch of these tests reads nobody's
conftest.py, so that no other project has a say in them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsa.torch_env import for_good

with for_good():
    from nsa.tests import maths


@pytest.fixture(autouse=True)
def _told(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    record_property("device", str(maths.device()))
    if topic := request.node.get_closest_marker("topic"):
        record_property("topic", topic.args[0])
