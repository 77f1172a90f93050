"""Known defects of the package, planted one at a time: a text of a file and what replaces it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent


@cache
def defects(*kinds: str) -> dict[str, tuple[str, str, str]]:
    """(path, old, new) by name, of the files of this folder with these names.

    One whose name ends with `control` changes nothing, and has to live.
    """
    texts = [(FOLDER / f"{kind}.yaml").read_text("utf-8") for kind in kinds]
    return {
        name: (one["path"], one["old"], one["new"])
        for text in texts
        for name, one in yaml.safe_load(text).items()
    }
