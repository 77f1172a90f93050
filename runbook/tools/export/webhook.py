"""The verdict as JSON to a URL that the user names. The URL is a secret, and may be out of reach.

Whoever knows the address of a chat's webhook may write there, so the address is shown by its host
only, in messages as in the record of a run.
"""

from __future__ import annotations

import json
import platform
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runbook import __version__
from runbook.errors import UsageError
from runbook.files import read_given
from runbook.folder.record import fingerprint_of
from runbook.folder.redact import REDACTED, redact_text
from runbook.records import RunRecord
from runbook.records.measurement import json_ready
from runbook.tools.export.numbers import duration_s, numbers_of

FLAG = "--webhook"
TIMEOUT_S = 10.0
# Seconds before the second and the third try.
PAUSES_S = (1.0, 3.0)
_LOCAL = ("localhost", "127.0.0.1", "::1")
# An answer that says "later"; any other 4xx says that the request is wrong, however often.
_LATER = (408, 425, 429)


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """An address that was checked; only `shown` may be printed."""

    url: str = field(repr=False)
    shown: str


def webhook_of(text: str) -> Webhook:
    """The webhook of `URL`, or of `@FILE` whose first line is one.

    Raises UsageError, which never repeats the address.
    """
    url = text
    if text.startswith("@"):
        try:
            url = read_given(Path(text[1:]), pipe=True).decode("utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{FLAG} {text}: the file cannot be read: {_why(error)}") from error
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise UsageError(f"{FLAG}: is no URL") from error
    problems = []
    secure = parts.scheme == "https" or (parts.scheme == "http" and host in _LOCAL)
    if not host or not secure:
        problems.append(f"{FLAG}: needs https://HOST/..., or http:// for localhost")
    if parts.username is not None or parts.password is not None:
        problems.append(f"{FLAG}: a login in the URL would not be sent; leave it out")
    if not url.isascii() or not url.isprintable() or " " in url:
        problems.append(f"{FLAG}: a URL has no blanks and only ASCII characters")
    if problems:
        raise UsageError(problems)
    return Webhook(url=url, shown=f"{parts.scheme}://{host}/{REDACTED}")


def blanked(words: Sequence[str]) -> list[str]:
    """The words of a command line as they may be recorded: without the address."""
    kept: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if kept and kept[-1] == FLAG and not word.startswith("@"):
            kept.append(REDACTED)
        elif flag == FLAG and equals and not value.startswith("@"):
            kept.append(f"{FLAG}={REDACTED}")
        else:
            kept.append(word)
    return kept


def verdict_document(
    record: RunRecord, run_root: Path, exit_code: int, report: str = ""
) -> dict[str, object]:
    """What is sent: the verdict with its scope and reasons, where the report is, the numbers.

    No variable of the environment is in it, and texts that repeat one's secret are blanked.
    """
    counted = Counter(check.outcome.value for check in record.checks())
    numbers = (
        {"name": one.name, "value": one.value, "unit": one.unit, "n": one.n, "outcome": one.outcome}
        for one in numbers_of(record)
    )
    document = {
        "schema_version": 1,
        "program": f"nsa-runbook {__version__}",
        "host": platform.node(),
        "run_id": record.run_id,
        "profile": record.profile,
        "verdict": record.verdict.value,
        "headline": record.headline,
        "scope": record.scope,
        "caveats": list(record.caveats),
        "reasons": list(record.reasons),
        "interrupted": record.interrupted,
        "exit_code": int(exit_code),
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "duration_s": duration_s(record),
        "folder": str(run_root),
        "fingerprint": fingerprint_of(record),
        "report": str(run_root / report) if report else "",
        "checks": dict(counted),
        "numbers": list(numbers),
    }
    return {name: json_ready(_safe(value)) for name, value in document.items()}


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return [_safe(item) for item in value]
    return value


def send(
    webhook: Webhook,
    document: object,
    *,
    timeout_s: float = TIMEOUT_S,
    pauses_s: Sequence[float] = PAUSES_S,
) -> str:
    """POST the document, again after each pause while it fails; return what went wrong, or "".

    Takes at most `timeout_s` a try, whatever the server does. Raises nothing for what a server or
    a network does. Redirects are not followed: they would hand the verdict to another address.
    """
    data = json.dumps(document).encode()
    problem, again = _try(webhook.url, data, timeout_s)
    tries = 1
    for pause_s in pauses_s:
        if not again:
            break
        time.sleep(pause_s)
        problem, again = _try(webhook.url, data, timeout_s)
        tries += 1
    return (
        f"{webhook.shown} {problem} ({tries} {'try' if tries == 1 else 'tries'})" if problem else ""
    )


def _try(url: str, data: bytes, timeout_s: float) -> tuple[str, bool]:
    """What went wrong, and whether another try may help; the whole try within its time.

    A socket's timeout counts from the last byte, so a server that drips bytes would keep us.
    """
    said: list[tuple[str, bool]] = []
    thread = threading.Thread(
        target=lambda: said.append(_post(url, data, timeout_s)), name="webhook", daemon=True
    )
    thread.start()
    thread.join(timeout_s)
    return said[0] if said else (f"gave no answer within {timeout_s:g} s", True)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """No other request: the 3xx itself is the answer."""


def _post(url: str, data: bytes, timeout_s: float) -> tuple[str, bool]:
    import http.client

    headers = {"Content-Type": "application/json", "User-Agent": f"nsa-runbook/{__version__}"}
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")  # noqa: S310
    # What is for this machine is never handed to a proxy.
    local = (urlsplit(url).hostname or "") in _LOCAL
    proxy = urllib.request.ProxyHandler({} if local else None)
    opener = urllib.request.build_opener(_NoRedirect, proxy)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            code = int(answer.status)
    except urllib.error.HTTPError as error:
        code = error.code
        error.close()
    except urllib.error.URLError as error:
        return f"cannot be reached: {_why(error.reason)}", True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"cannot be reached: {_why(error)}", True
    if 200 <= code < 300:
        return "", False
    return f"answers {code}", code >= 500 or code in _LATER


def _why(error: object) -> str:
    """The kind of an error, and the system's words; an error's own text may hold the address."""
    kind = type(error).__name__
    words = error.strerror if isinstance(error, OSError) else ""
    return f"{kind}: {words}" if words else kind
