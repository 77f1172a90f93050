"""How the Triton kernels are cut, tried on a device: each kernel's own time by rows, warps, stages.

    python -m benchmarks.triton_tune --out DIR [--shapes 2x2048,1x32768] [--only forward,...]
        [--left-s 300] [--processes 12]

A knob is a part of a cut (`tiles.Cut`, `CompressedCut`, `WindowCut`) and the kernels that it
decides. Each of its values is put in the place of the shipped one, alone; one forward and backward
pass of the whole core then runs under the profiler, at the production shape in bfloat16. What a
value computes is held against what the shipped cut computes, so that a wrong one cannot win.
Compiling takes longer than measuring, and goes before it, side by side in as many processes.

Every value is a line in rows.jsonl as soon as it is known; a line that is there is not repeated.
--save writes those that are faster than what was there by more than noise into the package, by the
device's name (`nsa.attention.triton.launch`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import yaml
from torch import Tensor

from benchmarks.attention.checks import CFG, inputs, largest_error, ours
from benchmarks.attention.times import breakdown
from benchmarks.attention_gpu import sparse
from benchmarks.program import TO_BE_CONTINUED, Program, append_line, markdown_table, read_lines
from nsa.attention.triton import launch
from nsa.attention.triton.launch import file_of, get, put, shapes_of
from nsa.attention.triton.tiles import Tile
from runbook.files import write_atomic

# What a different order of sums may change, as a share of the largest number: bfloat16's rounding.
_SAME = 2.0**-6
# A value is kept if it takes at most this share of the shipped one's time: below, it may be noise.
_WORTH = 0.97


def computed(x: dict[str, Tensor]) -> list[Tensor]:
    """Output and gradients of the core."""
    out, _ = ours(x, "triton")
    return [out.detach(), *torch.autograd.grad(out, list(x.values()), out.detach())]


def shapes(text: str) -> list[tuple[int, int]]:
    """ "2x2048,1x8192" as (batch, length)."""
    parts = (part.split("x") for part in text.split(","))
    return [(int(batch), int(length)) for batch, length in parts]


def comma_separated(text: str) -> list[str]:
    """The names."""
    return [name for name in text.split(",") if name]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One value of a knob at one shape: a part of the cut of a branch, and what it decides."""

    branch: str
    field: str
    kernels: tuple[str, ...]
    value: Any
    shape: tuple[int, int]

    @property
    def key(self) -> dict[str, Any]:
        """What its line is known by."""
        value = dataclasses.astuple(self.value) if isinstance(self.value, Tile) else self.value
        batch, length = self.shape
        return {
            "shape": f"{batch}x{length}",
            "branch": self.branch,
            "field": self.field,
            "value": list(value) if isinstance(value, tuple) else value,
        }

    @contextmanager
    def in_force(self) -> Iterator[list[Any]]:
        """Calls are cut with that value; the list has what they would be cut by without."""
        shipped, before = launch.CHOOSERS[self.branch], list[Any]()

        def exchanged(*args: Any) -> Any:
            cut = shipped(*args)
            before.append(get(cut, self.field))
            return put(cut, self.field, self.value)

        saved = launch._with_choices

        def unsaved(branch: str, cut: Any, *told: Any) -> Any:
            return cut if branch == self.branch else saved(branch, cut, *told)

        # What was saved before would come on top of it.
        with (
            patch.dict(launch.CHOOSERS, {self.branch: exchanged}),
            patch.object(launch, "_with_choices", unsaved),
        ):
            yield before


def cases(args: Any) -> list[Case]:
    """All that triton_knobs.yaml asks to try, a shape after the other."""
    text = Path(__file__).with_name("triton_knobs.yaml").read_text(encoding="utf-8")
    found = []
    for shape, (branch, knobs) in itertools.product(args.shapes, yaml.safe_load(text).items()):
        for field, told in knobs.items():
            if args.only and not set(args.only).intersection(told["kernels"]):
                continue
            values = told.get("values") or [
                Tile(rows=rows, warps=warps, stages=stages)
                for rows, warps, stages in itertools.product(*told["tiles"])
            ]
            found += [
                Case(branch=branch, field=field, kernels=tuple(told["kernels"]), value=value,
                     shape=shape)
                for value in values
            ]  # fmt: skip
    return found


def tensors(shape: tuple[int, int], device: str) -> dict[str, Tensor]:
    """Of that batch and length."""
    batch, length = shape
    return inputs(length, torch.bfloat16, device, batch)


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """One shape as it is: the tensors, what they give, and the kernels that run."""

    x: dict[str, Tensor]
    truth: list[Tensor]
    launched: set[str]

    @classmethod
    def at(cls, shape: tuple[int, int]) -> Shipped:
        """Measured."""
        x = tensors(shape, "cuda")
        launched = {one["kernel"] for one in breakdown(sparse(x, "triton"))}
        return cls(x=x, truth=computed(x), launched=launched)


def measure(case: Case, shipped: Shipped) -> dict[str, Any]:
    """Its line: milliseconds of its kernels, or why there are none."""
    row = case.key | {"kernels": list(case.kernels)}
    if not shipped.launched.intersection(case.kernels):
        return row | {"problem": "not launched at this shape"}
    with case.in_force() as before:
        try:
            ours(shipped.x, "triton")
            # The last one is of the choice of blocks; operators before it know less of the config.
            row["shipped"] = before[-1] == case.value
            error = largest_error(computed(shipped.x), shipped.truth)
            found = {one["kernel"]: one["ms"] for one in breakdown(sparse(shipped.x, "triton"))}
        except (RuntimeError, ValueError) as problem:  # too much shared memory, no such layout
            return row | {"problem": " ".join(str(problem).split())[:160]}
    time_ms = sum(found[name] for name in case.kernels if name in found)
    return row | {"ms": time_ms, "error": error, "right": error <= _SAME}


def compile_share(args: Any) -> None:
    """Run every n-th case once, so that what it compiles lies in Triton's cache."""
    number, of = (int(part) for part in args.compile.split("/"))
    kept: tuple[tuple[int, int], dict[str, Tensor]] | None = None
    for case in cases(args)[number::of]:
        if kept is None or kept[0] != case.shape:
            kept = case.shape, tensors(case.shape, "cuda")
        with case.in_force():
            try:
                computed(kept[1])
            except (RuntimeError, ValueError):
                continue  # measured later, and said there


def compile_all(program: Program) -> None:
    """All cases, by processes of their own."""
    args = program.args
    words = [sys.executable, "-m", "benchmarks.triton_tune", "--out", str(args.out)]
    words += ["--shapes", ",".join(f"{b}x{s}" for b, s in args.shapes)]
    words += ["--only", ",".join(args.only)]
    shares = [
        subprocess.Popen([*words, "--compile", f"{number}/{args.processes}"])
        for number in range(args.processes)
    ]
    for share in shares:
        try:
            share.wait(timeout=max(1.0, program.left_s / 2))
        except subprocess.TimeoutExpired:
            share.kill()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown: of every knob the shipped value and the best ones."""
    cells = []
    names = dict.fromkeys((row["shape"], row["branch"], row["field"]) for row in rows)
    for shape, branch, field in names:
        here = [r for r in rows if (r["shape"], r["branch"], r["field"]) == (shape, branch, field)]
        known = sorted((row for row in here if row.get("right")), key=lambda row: row["ms"])
        shipped = next((row for row in known if row["shipped"]), None)
        for row in [*known[:3], *([shipped] if shipped and shipped not in known[:3] else [])]:
            beside = f"{row['ms'] / shipped['ms']:.2f}" if shipped else "-"
            mark = "shipped" if row["shipped"] else ""
            figures = (json.dumps(row["value"]), f"{row['ms']:.4f}", beside, mark)
            cells.append((shape, branch, field, *figures))
        for row in here:
            if "ms" in row and not row["right"]:
                cells.append((shape, branch, field, json.dumps(row["value"]), "WRONG", "-", ""))
    return markdown_table(
        ("batch x S", "branch", "field", "rows, warps, stages", "ms", "/ shipped", ""), cells
    )


def chosen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best value of each kernel at each shape, where it is worth it."""
    found = []
    for shape, kernel in dict.fromkeys((row["shape"], row["kernels"][0]) for row in rows):
        here = [
            row
            for row in rows
            if row.get("right") and (row["shape"], row["kernels"][0]) == (shape, kernel)
        ]
        shipped = [row["ms"] for row in here if row["shipped"]]
        if not shipped:
            continue
        best = min(here, key=lambda row: row["ms"])
        if best["ms"] <= _WORTH * min(shipped):
            value = best["value"]
            if isinstance(value, list):
                value = dict(zip(("rows", "warps", "stages"), value, strict=True))
            kept = {"branch": best["branch"], "seq_len": length_of(best), "field": best["field"]}
            found.append(kept | {"value": value})
    return found


def length_of(row: dict[str, Any]) -> int:
    """Tokens of a sequence."""
    return int(row["shape"].partition("x")[2])


def measured_at(rows: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Lengths at which each branch was measured, be the assumed cut the best one there or not."""
    found: dict[str, set[int]] = {}
    for row in rows:
        if "ms" in row:
            found.setdefault(row["branch"], set()).add(length_of(row))
    return {branch: sorted(lengths) for branch, lengths in sorted(found.items())}


def save(rows: Sequence[dict[str, Any]]) -> None:
    """Into the package's folder, for this device; of other branches, what was there stays."""
    device = torch.cuda.get_device_name()
    path, choices, lengths = file_of(device), chosen(rows), measured_at(rows)
    if path.is_file():
        before = json.loads(path.read_text("utf-8"))
        choices += [one for one in before["choices"] if one["branch"] not in lengths]
        lengths = {**before["lengths"], **lengths}
    document = {
        "device": device,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shapes": shapes_of(CFG, torch.bfloat16.itemsize),
        "lengths": lengths,
        "choices": sorted(choices, key=lambda one: (one["branch"], one["seq_len"], one["field"])),
    }
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(document, indent=1) + "\n")


def main(argv: Sequence[str]) -> int:
    """0 all were measured, 1 one computes something else, 75 out of time."""
    program = Program(__doc__)
    add = program.parser.add_argument
    add("--shapes", type=shapes, default=shapes("2x2048,1x32768"), help="BATCHxS,...")
    add("--only", type=comma_separated, default=[], help="kernels, comma-separated (default: all)")
    add("--processes", type=int, default=12, help="that compile")
    add("--compile", default="", help="N/OF: compile this share, measure nothing")
    add("--save", action="store_true", help="write the best into the package")
    args = program.parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: times are what this is about")
    if args.compile:
        compile_share(args)
        return 0
    begun = time.monotonic()
    compile_all(program)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    lines = args.out / "rows.jsonl"
    rows: list[dict[str, Any]] = read_lines(lines)
    known = [{key: row[key] for key in ("shape", "branch", "field", "value")} for row in rows]
    done: tuple[tuple[int, int], Shipped] | None = None
    for case in cases(args):
        if case.key in known:
            continue
        if program.left_s < 5:
            program.write("out of time", table(rows), {"rows": rows})
            return TO_BE_CONTINUED
        if done is None or done[0] != case.shape:
            done = case.shape, Shipped.at(case.shape)
        rows.append(measure(case, done[1]))
        append_line(lines, rows[-1])
    if args.save:
        save(rows)
    wrong = [row for row in rows if "ms" in row and not row["right"]]
    text = f"{len(rows)} values, {len(wrong)} compute something else"
    program.write(text, table(rows), {"rows": rows, "device": torch.cuda.get_device_name()})
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
