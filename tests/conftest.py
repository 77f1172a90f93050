"""How the tests are spread over several workers (pytest-xdist)."""

from __future__ import annotations

from collections import Counter

import pytest

# A fixture of these scopes is made once for the tests that share it, often by a real launch.
# One of session scope is made once for each worker, and ties no tests together.
_SHARED = ("module", "package")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send tests that share a fixture to one worker, which then makes it only once."""
    shared = {item: _shared_fixtures(item) for item in items}
    users = Counter(name for names in shared.values() for name in names)
    for item, names in shared.items():
        if names:
            # A fixture made from another one goes where the other one is made.
            item.add_marker(pytest.mark.xdist_group(max(names, key=users.__getitem__)))


def _shared_fixtures(item: pytest.Item) -> list[str]:
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return []
    made = [(name, info.name2fixturedefs.get(name)) for name in info.names_closure]
    return [f"{by[-1].baseid}:{name}" for name, by in made if by and by[-1].scope in _SHARED]
