"""Does the loader answer? A data set, read for a moment as the trainer would read it.

python -m nsa.data.smoke --seq-len 1024 --batch 1 --timeout 60 --tokenizer gpt2
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter

from nsa.contract import ExitCode, NSAError
from nsa.data import DataStallError, Source, open_source
from nsa.launch.output import shout
from nsa.launch.process import leave
from nsa.settings import DataSection, Share, refusal

_DESCRIPTION = "Read a few batches of a data set as the trainer would, and say how long they took."
_EXITS = "Exit codes: 0 the loader answered in time, 1 it stalled, 2 it cannot be read as asked."


def main(argv: Sequence[str]) -> int:
    """Read the batches and print one JSON document; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa.data.smoke", description=_DESCRIPTION, epilog=_EXITS
    )
    add = parser.add_argument
    add("--seq-len", metavar="N", type=int, default=1024, help="tokens per sequence (1024)")
    add("--batch", metavar="N", type=int, default=1, help="sequences per batch (1)")
    add(
        "--timeout",
        metavar="S",
        type=float,
        default=60.0,
        help="seconds to open, and for each batch (60)",
    )
    add("--batches", metavar="N", type=int, default=20, help="batches to read (20)")
    add("--tokenizer", choices=("byte", "gpt2"), default="gpt2", help="gpt2 or byte (gpt2)")
    add("--tokenizer-file", metavar="FILE", default="", help="GPT-2's table, r50k_base.tiktoken")
    add("--dataset", choices=("fineweb_edu", "local"), default="fineweb_edu", help="(fineweb_edu)")
    add("--local-path", metavar="PATH", default="", help="file or folder for --dataset local")
    args = parser.parse_args(argv)
    try:
        sys.stdout.write(json.dumps(read(args)) + "\n")
    except (DataStallError, NSAError) as error:
        shout(str(error))
        return int(ExitCode.CRASH if isinstance(error, DataStallError) else ExitCode.CONFIG)
    return int(ExitCode.SUCCESS)


def read(args: argparse.Namespace) -> dict[str, object]:
    """What was read, and how fast. Raises DataStallError, and NSAError for what cannot be."""
    counts = {name: getattr(args, name) for name in ("seq_len", "batch", "batches")}
    problems = [
        f"--{n.replace('_', '-')} {v}: must be 1 or more" for n, v in counts.items() if v < 1
    ]
    if not 0 < args.timeout < math.inf:
        problems.append(f"--timeout {args.timeout:g}: must be a number of seconds above 0")
    if problems:
        raise refusal(problems)
    begin = perf_counter()
    data = DataSection(
        tokenizer=args.tokenizer,
        tokenizer_file=args.tokenizer_file,
        dataset=args.dataset,
        local_path=args.local_path,
        loader_timeout_s=args.timeout,
    )
    source = _opened(data, args)
    opened_s = perf_counter() - begin
    tokens, times = 0, [perf_counter()]
    for _ in range(args.batches):
        tokens += source.fetch().tokens[:, 1:].numel()
        times.append(perf_counter())
    seconds = times[-1] - times[0]
    source.close()
    return {
        "dataset": args.dataset,
        "tokenizer": args.tokenizer,
        "tokens": tokens,
        "open_s": round(opened_s, 3),
        "seconds": round(seconds, 3),
        "slowest_s": round(max(after - before for before, after in pairwise(times)), 4),
        "toks_per_s": round(tokens / seconds, 1),
        "where": source.where(),
    }


def _opened(data: DataSection, args: argparse.Namespace) -> Source:
    """The source, opened within --timeout: without a network that alone may take long."""
    share = Share(seq_len=args.seq_len, batch_size=args.batch)
    opening = ThreadPoolExecutor(1).submit(open_source, data, share)
    try:
        return opening.result(timeout=args.timeout)
    except TimeoutError:
        text = f"{args.dataset} was not open after {args.timeout:g} s (--timeout)"
        raise DataStallError(text) from None


if __name__ == "__main__":
    # A thread may be deep in a request; nothing is left to write.
    leave(main(sys.argv[1:]))
