"""Attention forward and backward on a device: Native Sparse Attention beside dense causal kernels.

    python -m benchmarks.attention_gpu --out DIR [--lengths 1024,...,32768] [--rounds 9]
        [--shapes 12/2/64,64/4/128] [--device cuda|cpu] [--left-s 480]
        [--peers flash-nsa,fla,...,MODULE:CALLABLE]

The core without projections, batch 1, bfloat16 on a GPU and float32 on a CPU; on a GPU by masks,
and by Triton's kernels. A shape is query heads, groups and width: 12/2/64 is the production's,
64/4/128 what public kernels are timed at.
First what is computed: outputs and gradients against the written-out reference in float64, up to
--check-to tokens; beyond, the outputs of the first ones, which see nothing of the rest. Then how
long: all arms in turn (A B C, C B A, ...), CUDA events around forward and backward passes that are
replayed (one column says what they take launched by the host, which is all that is known of a peer
that waits for its host and cannot be recorded), or CPU time of the process. Peak
memory is what the allocator held at most, less what was there before; on a CPU it is not
measured. Last, for our arms: the kernels on the device, each by itself.

A peer is somebody else's kernel: by name one of `benchmarks.attention.peers`, all of them unless
told otherwise, or a callable that takes the eight tensors of `Branches` by name and cfg, and
returns the output. It is held against the same reference, shown as WRONG where it computes
something else, and timed all the same; it decides nothing of the exit status. One that is not
installed, or does not take a shape, is a line that says so. How to install each is in
benchmarks/results/README.md.

Dense is scaled_dot_product_attention, causal, with grouped keys where a kernel takes them, by each
of its kernels alone; ratios are against the best of them. Every arm is a line in rows.jsonl as
soon as its length is known; a shape's length that is there is not repeated.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.checks import (
    BOUND,
    CFG,
    Arm,
    called,
    cfg_of,
    check_dense,
    check_peer,
    check_sparse,
    inputs,
    ours,
)
from benchmarks.attention.peers import FAILURES, PEERS, Peer, find_peer
from benchmarks.attention.times import Timed, breakdown, kernel_table, peak_bytes, timed
from benchmarks.program import TO_BE_CONTINUED, Program, markdown_table, names, numbers
from nsa.attention import choose_selected
from nsa.config import Kernels, NSAConfig

# Query heads, groups and width.
PRODUCTION = "12/2/64"
DENSE = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sparse(x: dict[str, Tensor], kernels: Kernels) -> Arm:
    """The path that a model takes on this device, by SDPA or by what Triton kernels there are."""

    def run() -> tuple[Tensor, Sequence[Tensor]]:
        out, _ = ours(x, kernels)
        return out, list(x.values())

    return run


def dense(x: dict[str, Tensor], backend: SDPBackend | None) -> Arm:
    """Causal attention by one kernel; None leaves the choice to torch, as on a CPU."""
    parts = [x[name].detach().transpose(1, 2).contiguous() for name in ("q", "k_sel", "v_sel")]
    leaves = [part.requires_grad_() for part in parts]
    times = x["q"].shape[2] // x["k_sel"].shape[2]

    def grouped(native: bool) -> Tensor:
        q, k, v = leaves
        if not native:
            k, v = (part.repeat_interleave(times, 1) for part in (k, v))
        if backend is None:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=native)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=native)

    native = backend is not None
    if native:
        try:
            grouped(True)
        except RuntimeError:  # this kernel wants a key for each query head
            native = False
    return lambda: (grouped(native).transpose(1, 2), leaves)


def ways(x: dict[str, Tensor]) -> dict[str, Kernels]:
    """Arms of ours by their kernels: masked SDPA, Triton where that can run."""
    q = x["q"]
    triton = choose_selected(cfg_of(x), seq_len=q.shape[1], dtype=q.dtype, device=q.device)
    found: dict[str, Kernels] = {"nsa": "masked"}
    return found | ({"nsa triton": "triton"} if triton.value == "triton" else {})


def foreign(x: dict[str, Tensor], peer: Peer) -> Arm:
    """Somebody else's kernel."""
    return lambda: (called(peer, x), list(x.values()))


def arms_for(x: dict[str, Tensor], device: str, peers: dict[str, Peer]) -> dict[str, Arm]:
    """What is compared; ours first, and last what may leave a device in disorder."""
    kinds = {"dense": None} if device == "cpu" else {f"dense {n}": one for n, one in DENSE.items()}
    found = {name: sparse(x, kernels) for name, kernels in ways(x).items()}
    found |= {name: dense(x, backend) for name, backend in kinds.items()}
    return found | {name: foreign(x, peer) for name, peer in peers.items()}


def config_of(shape: str) -> NSAConfig:
    """The config of "heads/groups/width", else as in production."""
    heads, groups, width = map(int, shape.split("/"))
    return replace(CFG, n_heads=heads, n_kv_groups=groups, d_k=width, d_v=width)


def measure(
    seq_len: int,
    device: str,
    rounds: int,
    check_to: int,
    peers: dict[str, Peer],
    shape: str = PRODUCTION,
) -> list[dict[str, Any]]:
    """All arms at one length: error, times of every round, peak memory."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = inputs(seq_len, dtype, device, cfg=config_of(shape))
    arms = arms_for(x, device, peers)
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, Timed] = {}
    for name, arm in arms.items():
        row = rows[name] = {"seq_len": seq_len, "shape": shape, "arm": name, "dtype": str(dtype)}
        row |= {"raw_s": [], "bound": BOUND[dtype]}
        failures = FAILURES if name in peers else (RuntimeError,)
        try:
            if name in peers:
                row["note"] = peers[name].note
                row["error"], row["compared"] = check_peer(x, check_to, peers[name])
            elif name.startswith("dense"):
                row["error"], row["compared"] = check_dense(arm, check_to)
            else:
                row["error"], row["compared"] = check_sparse(x, check_to, ways(x)[name])
            row["peak_bytes"] = peak_bytes(arm, device)
            ready[name] = made = timed(arm, device, may_launch=name in peers)
            row["by_host_ms"] = None if made.by_host_s is None else 1e3 * made.by_host_s
            row["replayed"] = made.replayed
        except failures as error:  # no such kernel here, or out of memory
            row["problem"] = (str(error) or type(error).__name__).partition("\n")[0][:200]
        row["right"] = row.get("error", float("inf")) <= BOUND[dtype]
    order = list(ready)
    for round_ in range(rounds):
        for name in order if round_ % 2 == 0 else reversed(order):
            rows[name]["raw_s"].append(ready[name].once(device))
    _add_ratios(rows)
    if device == "cuda":
        for name in filter(is_ours, order):
            rows[name]["kernels"] = breakdown(arms[name])
    return list(rows.values())


def _add_ratios(rows: dict[str, dict[str, Any]]) -> None:
    """Each arm against the dense kernel with the best median, round by round."""
    totals = {name: [sum(pair) for pair in row["raw_s"]] for name, row in rows.items()}
    known = {n: statistics.median(t) for n, t in totals.items() if t and n.startswith("dense")}
    best = min(known, key=known.__getitem__, default=None)
    for name, row in rows.items():
        if not totals[name]:
            continue
        row["total_ms"] = 1e3 * statistics.median(totals[name])
        row["forward_ms"] = 1e3 * statistics.median(pair[0] for pair in row["raw_s"])
        if best is not None:
            ratios = [a / b for a, b in zip(totals[name], totals[best], strict=True)]
            row |= {"beside": best, "ratio": statistics.median(ratios)}
            row |= {"ratio_min": min(ratios), "ratio_max": max(ratios)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    cells: list[tuple[object, ...]] = []
    problems: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "problem" in row:
            problems.setdefault((row["arm"], row["problem"]), []).append(row)
            continue
        ratio = "-"
        if "ratio" in row:
            ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        right = f"{row['note']}; " if row.get("note") else ""
        right += "" if row["right"] else f"WRONG, above {row['bound']:.2g}: "
        right += "" if row["replayed"] or row["by_host_ms"] is None else "launched by the host; "
        cells.append(
            (
                *(row["shape"], row["seq_len"], row["arm"]),
                *(f"{row['forward_ms']:.3f}", f"{row['total_ms']:.3f}", ratio),
                *("-" if row["by_host_ms"] is None else f"{row['by_host_ms']:.3f}", peak),
                f"{right}{row['error']:.1e} ({row['compared']})",
            )
        )
    times = ("fwd ms", "fwd+bwd ms", "beside best dense", "by the host")
    for (arm, problem), those in problems.items():
        where = ({str(row[key]): None for row in those} for key in ("shape", "seq_len"))
        cells.append((*map(", ".join, where), arm, *"-----", problem))
    header = ("shape", "S", "arm", *times, "peak MiB", "error")
    text = markdown_table(header, cells)
    return f"{text}\n{kernels}" if (kernels := kernel_table(rows)) else text


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence."""
    wrong = [f"{row['arm']} at {_place(row)}" for row in rows if is_wrong(row)]
    ratios = [
        f"{_place(row)}{row['arm'].removeprefix('nsa')}: {row['ratio']:.2f}"
        for row in rows
        if is_ours(row["arm"]) and "ratio" in row
    ]
    text = f"time beside the best dense kernel at S = {', '.join(ratios) or '(nothing measured)'}"
    return f"WRONG: {', '.join(wrong)}; {text}" if wrong else text


def _place(row: dict[str, Any]) -> str:
    """The length, with the shape where it is not the production's."""
    shape = "" if row["shape"] == PRODUCTION else f" of {row['shape']}"
    return f"{row['seq_len']}{shape}"


def is_ours(arm: str) -> bool:
    """Is it sparse attention, and no dense kernel?"""
    return arm.startswith("nsa")


def is_wrong(row: dict[str, Any]) -> bool:
    """Ran and computed something else; or is ours, and did not run at all. A peer never is."""
    return (
        not row["arm"].startswith("peer")
        and not row["right"]
        and ("problem" not in row or is_ours(row["arm"]))
    )


def main(argv: Sequence[str]) -> int:
    """0 all right, 1 an arm computes something else or ours does not run, 75 out of time."""
    program = Program(__doc__)
    add = program.parser.add_argument
    add("--lengths", type=numbers, default=[1024, 2048, 4096, 8192, 16384, 32768])
    add("--shapes", type=names, default=[PRODUCTION])
    add("--rounds", type=int, default=9)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--check-to", type=int, default=4096, help="tokens that are held against float64")
    add("--peers", type=names, default=list(PEERS), help="names, or module:callable of a kernel")
    args = program.parse(argv)
    peers = {f"peer {text}": find_peer(text) for text in args.peers}
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --device cpu compares small shapes on the CPU")
    if args.device == "cpu":
        torch.set_num_threads(1)  # waiting threads would count as CPU time
    rows, longest_s = program.rows, 0.0
    for shape, seq_len in product(args.shapes, args.lengths):
        if any((row["shape"], row["seq_len"]) == (shape, seq_len) for row in rows):
            continue
        # Four times the work at twice the length, at most.
        if rows and program.left_s < 4 * longest_s:
            return TO_BE_CONTINUED
        begun = time.monotonic()
        for row in measure(seq_len, args.device, args.rounds, args.check_to, peers, shape):
            program.keep(row)
        longest_s = time.monotonic() - begun
        program.write(summary(rows), table(rows), {"rows": rows})
    program.write(summary(rows), table(rows), {"rows": rows, "torch": torch.__version__})
    return 1 if any(is_wrong(row) for row in rows) else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    raise SystemExit(main(sys.argv[1:]))
