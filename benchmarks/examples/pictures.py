"""Pictures of pages, as a browser shows them: at two widths, light and dark, and one whole."""

from __future__ import annotations

from pathlib import Path

from tests.reports.browser import MISSING, chromium, running

# Width and height of a desktop's first screen and of a phone's.
SCREENS = ((1400, 900), (420, 860))


def picture_name(page: str, width: int, *, dark: bool) -> str:
    """`hang-420-dark.png`."""
    return f"{page}-{width}-{'dark' if dark else 'light'}.png"


# Of the README: from the verdict to the end of what decided it.
WHOLE = "go"
_END = "Math.ceil(document.getElementById('decided').getBoundingClientRect().bottom) + 16"


def whole_name(page: str) -> str:
    """`go-whole.png`."""
    return f"{page}-whole.png"


def take_pictures(pages: dict[str, Path], out: Path) -> None:
    """First screens of every page into `out`. Raises FileNotFoundError where no browser is."""
    program = chromium()
    if program is None:
        raise FileNotFoundError(MISSING)
    out.mkdir(parents=True, exist_ok=True)
    with running(program) as browser:
        for name, page in pages.items():
            for width, height in SCREENS:
                for dark in (False, True):
                    browser.open(page.absolute(), width=width, height=height, dark=dark)
                    browser.screenshot(out / picture_name(name, width, dark=dark))
        if WHOLE in pages:
            page, (width, height) = pages[WHOLE].absolute(), SCREENS[0]
            browser.open(page, width=width, height=height)
            browser.open(page, width=width, height=int(browser.value(_END)))
            browser.screenshot(out / whole_name(WHOLE))
