"""A headless Chromium that answers one question about one page, or takes its picture."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = f"no browser: none of {', '.join(NAMES)} is installed (apt-get install chromium)"
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def chromium() -> str | None:
    """The path of an installed browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def asked(page: Path, question: str, *, width: int, height: int = 900, dark: bool = False) -> Any:
    """What the expression is worth on a page of this size and color scheme, as JSON.

    The page lies in a frame of another one, which asks; its policy, which permits nobody to ask, is
    left out.
    """
    inner = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
    ask = f"document.body.dataset.told = JSON.stringify(frames[0].eval({json.dumps(question)}))"
    outer = (
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<body><iframe style="width:{width}px;height:{height}px;border:0" '
        f'srcdoc="{html.escape(inner)}" onload="{html.escape(ask)}"></iframe>'
    )
    scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    with NamedTemporaryFile("w", encoding="utf-8", suffix=".html") as file:
        file.write(outer)
        file.flush()
        told = _run(Path(file.name), scheme, "--dump-dom")
    found = re.search(r'data-told="([^"]*)"', told)
    assert found is not None, "the page did not load"
    return json.loads(html.unescape(found[1]))


def take_picture(page: Path, out: Path, *, width: int, height: int) -> None:
    """The page at this size as PNG."""
    _run(page, f"--window-size={width},{height}", f"--screenshot={out.absolute()}")


def _run(page: Path, *words: str) -> str:
    program = chromium()
    if program is None:
        raise FileNotFoundError(MISSING)
    done = subprocess.run(
        [program, *_FLAGS, *words, page.absolute().as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout
