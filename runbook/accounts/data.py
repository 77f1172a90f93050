"""What the ranks read: tokens are counted, each rank reads its own, generated ones are known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runbook.accounts import GeneratedData, Workload, due, each_rank
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd


def token_account(frame: pd.DataFrame, ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Tokens that entered the embedding and positions that got a gradient, on every rank."""
    problems = _embedded_problems(ranks, work)
    if "tokens" in frame and (frame["tokens"] != work.step_tokens * work.nproc).any():
        problems.append("column tokens is not what the ranks embed together")
    return problems


@each_rank
def _embedded_problems(rank: RankLog, work: Workload) -> Iterator[str]:
    if rank.steps is None or rank.steps["embedded"].isna().any():
        yield " does not say how many tokens it embedded"
        return
    wrong = rank.steps[rank.steps["embedded"] != work.step_tokens]
    if len(wrong):
        step, seen = wrong["step"].iloc[0], wrong["embedded"].iloc[0]
        yield f" embedded {seen:.0f} tokens in step {step:.0f}, not {work.step_tokens}"
    positions = (rank.proof or {}).get("positions")
    if positions != work.pass_tokens:
        yield f" takes the loss at {positions} positions of {work.pass_tokens} in a pass"
    fetched, embedded = (rank.ending.get(name) for name in ("fetched_sum", "embedded_sum"))
    if fetched is None or fetched != embedded:
        yield f" embeds other tokens than it fetched: {embedded} for {fetched}"


def data_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Every rank reads its own data, no step what another did, and generated data as defined."""
    problems: list[str] = []
    told: dict[int, pd.Series[Any]] = {}
    repeats: set[int] = set()
    for rank in ranks:
        if rank.steps is None or rank.steps["data"].isna().any():
            problems.append(f"rank {rank.rank} does not say which data it read")
            continue
        own = _digests(rank.steps).astype(str)
        again = own[own.duplicated()] if work.data else own[own.eq(own.shift())]
        if len(again):
            problems.append(f"rank {rank.rank} reads in step {again.index[0]} what it read before")
            repeats.add(rank.rank)
        told[rank.rank] = own
    if len(told) > 1:
        problems += _read_by_another(told, work, repeats)
    return problems + _rank_problems(ranks, told, work)


@each_rank
def _rank_problems(
    rank: RankLog, told: Mapping[int, pd.Series[Any]], work: Workload
) -> Iterator[str]:
    if work.data is None:
        yield from _other_text(rank)
    elif rank.rank in told:
        yield from _other_rows(rank, told[rank.rank], work.data)


def _other_rows(rank: RankLog, told: pd.Series[Any], made: GeneratedData) -> Iterator[str]:
    """Steps whose data are not the rows that seed, step and rank make of generated data."""
    # One token; that it is the launch's own is another row's to say.
    token = min(rank.tokens, default="")
    drawn = made.drawn(token, [int(step) for step in told.index])
    wrong = [s for s in drawn if int(told[s], 16) != int(made.of_step(rank.rank, s), 16)]
    if wrong:
        yield (
            f" reads in step {wrong[0]} other rows than {made.kind} data of seed {made.seed} have "
            f"({len(wrong)} of {len(drawn)} steps looked at)"
        )


def _other_text(rank: RankLog) -> Iterator[str]:
    """Documents whose tokens, turned back, are another text than was read.

    Of a launch that goes on from a checkpoint, which begins within a document, nothing is known.
    """
    if rank.first_step != 1:
        return
    text = (rank.proof or {}).get("text") or {}
    read, decoded = text.get("read"), text.get("decoded")
    if not read or not decoded or not text.get("bytes"):
        yield " does not turn the tokens of its first documents back"
    elif read != decoded:
        yield (
            " trains on another text than its documents have: tokens turned back "
            f"differ from byte {text.get('apart')} of {text['bytes']} ({text.get('documents')} "
            "documents)"
        )


@each_rank
def held_out_account(rank: RankLog, work: Workload) -> Iterator[str]:
    """Evaluations are on what is held out, and on the same each time."""
    told = [evaluation.get("data") for evaluation in rank.evaluations]
    if None in told or (not told and due(rank, work.eval_every)):
        yield " does not say on which data it evaluated"
        return
    if not told:
        return
    wanted = told[0]
    if work.data:
        if not work.data.can_make(work.eval_batches):
            yield f" tells of {work.eval_batches} batches in an evaluation"
            return
        wanted = work.data.held_out(rank.rank, work.eval_batches)
    wrong = [one for one in told if int(str(one), 16) != int(str(wanted), 16)]
    if wrong:
        what = f"the held-out rows of seed {work.data.seed}" if work.data else "those of the first"
        yield f" evaluates on other data than {what} ({len(wrong)} of {len(told)})"


def _read_by_another(
    told: Mapping[int, pd.Series[Any]], work: Workload, repeats: Collection[int]
) -> list[str]:
    """Data that a rank reads and an earlier one has read, held against the first that did.

    In the same step, or, where data are generated and none is ever read twice, in any.
    """
    import pandas as pd

    reads = pd.concat(told, names=["rank", "step"]).rename("data").reset_index()
    if reads["data"].is_unique:
        return []
    reads["other"] = reads.groupby(["step", "data"])["rank"].transform("first")
    shared = reads["rank"] != reads["other"]
    problems = [
        f"ranks {other} and {rank} read the same data in {len(steps)} steps, "
        f"first in step {steps['step'].iloc[0]}"
        for (rank, other), steps in reads[shared].groupby(["rank", "other"])
    ]
    if not work.data:
        return problems
    first = reads.groupby("data")
    reads["other"] = first["rank"].transform("first")
    moved = (reads["rank"] != reads["other"]) & (reads["step"] != first["step"].transform("first"))
    moved &= ~shared & ~reads["rank"].isin(repeats)
    return problems + [
        f"rank {rank} reads in step {steps['step'].iloc[0]} what rank {other} reads in another "
        f"({len(steps)} steps)"
        for (rank, other), steps in reads[moved].groupby(["rank", "other"])
    ]


def _digests(steps: pd.DataFrame) -> pd.Series[Any]:
    """The digest of each step's data; a step that is there twice counts once."""
    once = steps[["step", "data"]].drop_duplicates("step")
    digests: pd.Series[Any] = once.set_index("step")["data"]
    return digests


def union_of_data(ranks: Sequence[RankLog]) -> pd.Series[Any] | None:
    """For each step the sum of the ranks' digests: equal for one rank that reads everything."""
    total = None
    for rank in ranks:
        if rank.steps is None or rank.steps["data"].isna().any():
            return None
        # As Python's own numbers: pandas would add int64 and uint64 as floats.
        own = _digests(rank.steps).map(lambda text: int(str(text), 16)).astype(object)
        total = own if total is None else total + own
    return None if total is None else total.map(lambda number: number % (1 << 64))
