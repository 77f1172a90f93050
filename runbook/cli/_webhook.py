"""`--webhook`, for every command that ends with a verdict."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.console import Console
from runbook.errors import UsageError

if TYPE_CHECKING:
    from runbook.records import RunRecord

_REPORT = "html"


def add_webhook(parser: argparse._ActionsContainer) -> None:
    """The option; `webhook_problems` checks it and `tell_webhook` uses it."""
    parser.add_argument(
        "--webhook",
        metavar="URL|@FILE",
        help="POST the verdict there as JSON at the end; the URL is kept secret, in a FILE also "
        "from `ps`; a failure is a warning and changes no exit code (default: nobody is told)",
    )


def webhook_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the address, before anything starts; it is never repeated."""
    from runbook.tools.export.webhook import webhook_of

    try:
        args.checked_webhook = webhook_of(args.webhook) if args.webhook is not None else None
    except UsageError as error:
        return list(error.problems)
    return []


def tell_webhook(
    args: argparse.Namespace, record: RunRecord, run_root: Path, code: int, console: Console
) -> None:
    """Send the verdict if it was asked for. Whatever happens, the run's exit code stays."""
    from runbook.registry import report_files
    from runbook.tools.export.webhook import send, verdict_document

    if args.checked_webhook is None:
        return
    name = report_files().get(_REPORT, "")
    report = name if (run_root / name).is_file() else ""
    try:
        problem = send(args.checked_webhook, verdict_document(record, run_root, code, report))
    except KeyboardInterrupt:
        problem = f"{args.checked_webhook.shown} was interrupted"
    if problem:
        console.error(f"warning: the verdict was not delivered: {problem}")
    else:
        console.progress(f"verdict sent to {args.checked_webhook.shown}")
