"""Rows from accounts that must balance: what the trainer says, against a second source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nsa.contract import ENV_JSON
from phases.kit import table
from phases.kit.case import Case, once
from phases.kit.finding import (
    Finding,
    failed,
    in_a_row,
    incomplete,
    inconclusive,
    invalid,
    missing,
    passed,
    warned,
    whole,
)
from phases.kit.measure import log_value, rank_value
from phases.training.own import own_accounts
from runbook.accounts import Workload
from runbook.accounts.clocks import FEW_CLOCKED
from runbook.accounts.first_weights import begins, groups_of
from runbook.accounts.model import oracle_tolerance
from runbook.accounts.registry import Row, Sources, Unbalanced, unbalanced
from runbook.records import Reason
from runbook.records.evidence import LaunchEvidence

# Types as profiles call them, and as torch does.
_TORCH_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@once
def balanced(case: Case, name: str) -> Finding:
    """PASS if time, tokens, data, memory, processes and the tables have a second source."""
    if case.profile.own_trainer:
        return own_accounts(case, name)
    log, launch, sources = case.log(name), _every_rank(case, name), _sources(case, name)
    off = unbalanced(sources, Row.ACCOUNTS)
    value = log_value(log, "tokens", float(log.frame["tokens"].sum()), "tokens")
    paths = (log.path, *(rank.path for rank in launch.ranks))
    if off and all(text.endswith(FEW_CLOCKED) for text in off.problems):
        # Dumps, evaluations or saves in nearly every step: nobody's fault, and no answer.
        why = "nearly every step has a dump, an evaluation or a save beside it"
        reason = f"{name}: {in_a_row(off.problems)}: {why}"
        return inconclusive(
            Reason.TOO_FEW_SAMPLES, reason, measurement=value, evidence=paths, topic="beside"
        )
    if off:
        found = _failed(off, name, (*paths, launch.path("env")))
        if found.code is Reason.MISMATCH:
            # The files agree, and tell of another setting: they are right.
            return found
        title = f"Two sources disagree about the same steps, so no number of {name} counts."
        return replace(found, measurement=value, title=found.title or title)
    reason = f"{len(log.frame)} steps on {len(launch.ranks)} rank(s): two sources agree on each"
    return passed(reason, measurement=value, evidence=paths)


def learned_from(case: Case, name: str) -> Finding:
    """PASS if every rank's gradient arrives, and every group of parameters gets one and moves."""
    launch, sources = _every_rank(case, name), _sources(case, name)
    paths = [rank.path for rank in launch.ranks]
    if off := unbalanced(sources, Row.GRADIENTS):
        return _failed(off, name, paths)
    proof = launch.ranks[0].proof or {}
    groups = len(proof.get("own_gradient") or ())
    value = rank_value(launch.ranks[0], "gradient_mean", float(proof["mean_high"]), "of the mean")
    reason = (
        f"the gradients of {sources.work.nproc} rank(s) arrive as {proof.get('wire')}, "
        f"all {groups} groups of parameters got one and moved"
    )
    return passed(reason, measurement=value, evidence=paths)


def as_written(case: Case, name: str) -> Finding:
    """PASS if the model computed for its first batch what the equations say.

    FAIL too if a kernel failed the trainer's self-test, though the trainer then did without it: a
    device or a build that gives wrong numbers there is not to be trusted elsewhere. A kernel that
    could not run at all is a warning.
    """
    launch, sources = _every_rank(case, name), _sources(case, name)
    paths, work = [rank.path for rank in launch.ranks], sources.work
    if off := unbalanced(sources, Row.ORACLE):
        return _failed(off, name, paths)
    spots = [(rank.proof or {})["oracle"] for rank in launch.ranks]
    worst = max(launch.ranks, key=lambda rank: float((rank.proof or {})["oracle"]["attention"]))
    error = float((worst.proof or {})["oracle"]["attention"])
    value = rank_value(worst, "attention_error", error, "share")
    count = sum(len(found.get("positions") or ()) for found in spots)
    most = max(float(found[n]) for found in spots for n in ("attention", "layer", "logits"))
    begun = "the weights go on from a checkpoint"
    if begins(launch.ranks):
        begun = f"the weights of {len(groups_of(case.env(name)))} groups begin as they have to"
    reason = (
        f"attention, layer and logits at {count} positions of the first batch, S={work.seq_len}: "
        f"off by at most {most:.2g} of themselves, allowed {oracle_tolerance(work):.2g}; " + begun
    )
    tested = _self_test(case, name)
    reason += f"; the self-test agrees with {', '.join(tested)}" if tested else ""
    return _self_tested(case, name) or passed(reason, measurement=value, evidence=paths)


def _failed(off: Unbalanced, name: str, paths: Sequence[str]) -> Finding:
    """FAIL with everything that is off, for the reason of the account that it is about."""
    account = off.account
    reason = f"{name}: {in_a_row(off.problems)}"
    if account is None:
        return failed(off.found[0][0].reason, reason, evidence=paths)
    title = table("playbook")["titles"].get(account.topic, "").format(name=name)
    return failed(account.reason, reason, evidence=paths, topic=account.topic, title=title)


def _attention(case: Case, name: str) -> Mapping[str, Any]:
    """How the trainer ran attention, and what it tested before."""
    found: Mapping[str, Any] = case.env(name).get("attention") or {}
    return found


def _ways(case: Case, name: str) -> tuple[str | None, str | None]:
    """How the window and the selected branch ran, as env.json says; None where it does not."""
    attention = _attention(case, name)
    window, selected = ((attention.get(branch) or {}) for branch in ("window", "selected"))
    return window.get("value"), selected.get("value")


def _self_test(case: Case, name: str) -> Mapping[str, Any]:
    """The kernels that the trainer tested on its device, by name."""
    found: Mapping[str, Any] = (_attention(case, name).get("self_test") or {}).get("paths") or {}
    return found


def _untested(case: Case, name: str) -> str:
    """In what the self-test on the GPU is not that of what was trained, or an empty string.

    The tests of preflight run small shapes; only the self-test runs those of the training.
    """
    tested = _attention(case, name).get("self_test") or {}
    window, selected = _ways(case, name)
    work = case.profile.workload
    if not tested.get("ran"):
        return f"no self-test on the GPU ({tested.get('reason') or 'env.json tells of none'})"
    # Torch's own kernels run the selected branch in every one of its tests.
    for ran in (window, selected) if selected not in (None, "sdpa") else (window,):
        if ran not in _self_test(case, name):
            return f"the self-test tells nothing of {ran or 'the window branch'}, which ran"
    trained = (work.seq_len, _TORCH_TYPES.get(work.dtype, work.dtype))
    if (tested.get("seq_len"), tested.get("dtype")) != trained:
        tried = f"S={tested.get('seq_len')}, {tested.get('dtype')}"
        return f"the self-test was of {tried}; trained was S={trained[0]}, {trained[1]}"
    return ""


def _self_tested(case: Case, name: str) -> Finding | None:
    """What the trainer found wrong with its kernels, or that nobody knows; else None."""
    # What was left out may be the one that failed.
    whole(case.launch(name), f"{ENV_JSON}.attention", "env")
    bad = {
        kind: found
        for kind, found in _self_test(case, name).items()
        if not found.get("agrees") or found.get("problems")
    }
    paths = (case.launch(name).path("env"),)
    if not bad:
        why = _untested(case, name) if case.profile.has_gpu else ""
        untested = partial(incomplete, Reason.NOTHING_COLLECTED, evidence=paths, topic="untested")
        return untested(f"{name}: {why}") if why else None
    ran = " and ".join(way for way in _ways(case, name) if way and way not in bad)
    told = "; ".join(
        f"{kind}: {', '.join((found.get('problems') or ('no reason given',))[:3])}"
        for kind, found in bad.items()
    )
    reason = f"{name}: the self-test rejected {told}; {ran or 'nothing else'} ran instead"
    if all(found.get("refused") for found in bad.values()):
        return warned(reason, evidence=paths, topic="self_test")
    return failed(Reason.MISMATCH, reason, evidence=paths, topic="self_test")


def _every_rank(case: Case, name: str) -> LaunchEvidence:
    """The launch, if each of its ranks left heartbeats: nothing balances against silence."""
    launch = case.completed(name)
    found = sorted(rank.rank for rank in launch.ranks)
    if found != list(range(launch.launch.nproc)):
        raise missing(f"{name}: heartbeats of ranks {found}, planned are {launch.launch.nproc}")
    return launch


def _sources(case: Case, name: str) -> Sources:
    import pandas as pd

    launch, env = case.launch(name), case.env(name)
    try:
        work = Workload.of(env)
    except ValueError as error:
        path = launch.path("env")
        reason = f"{path} does not say what was trained: {error}"
        raise invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(path,)) from error
    return Sources(
        frame=launch.training.frame if launch.training else pd.DataFrame(),
        ranks=launch.ranks,
        work=work,
        env=env,
        gates=launch.gates,
        val=launch.val,
        duration_s=launch.result.duration_s,
        exits=launch.result.ranks,
        given=launch.launch.env,
    )
