"""How the Triton kernels are cut, tried on a device: each kernel's own time by rows, warps, stages.

    python -m benchmarks.triton_tune --out DIR [--shapes 2x2048,1x32768] [--only forward,...]
        [--left-s 300] [--processes 12]

A knob is a part of a cut (`SelectedCut`, `CompressedCut`, `WindowCut`) and the kernels that it
decides. Each of its values is put in the place of the shipped one, alone; one forward and backward
pass of the whole core then runs under the profiler, at the production shape in bfloat16. What a
value computes is held against what the shipped cut computes, so that a wrong one cannot win.
Compiling takes longer than measuring, and goes before it, side by side in as many processes.

Every value is a line in rows.jsonl as soon as it is known; a line that is there is not repeated.
--save writes those that are faster than what was there by more than noise into the package, by the
device's name (`nsa.attention.triton`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, reduce
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
from benchmarks.program import TO_BE_CONTINUED, Program, markdown_table, names
from nsa.attention.triton import Tile, launch
from runbook.files import write_atomic

# What a different order of sums may change, as a share of the largest number: bfloat16's rounding.
_SAME = 2.0**-6
# A value is kept if it takes at most this share of the shipped one's time: below, it may be noise.
_WORTH = 0.97
# What a line is of, beside the value.
KNOB = ("shape", "branch", "field")


def computed(x: dict[str, Tensor]) -> list[Tensor]:
    """Output and gradients of the core."""
    out, _ = ours(x, "triton")
    return [out.detach(), *torch.autograd.grad(out, list(x.values()), out.detach())]


def shapes(text: str) -> list[tuple[int, int]]:
    """ "2x2048,1x8192" as (batch, length)."""
    parts = (part.split("x") for part in text.split(","))
    return [(int(batch), int(length)) for batch, length in parts]


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
        saved, before = launch._with_choices, list[Any]()

        # In the place of what was saved before, which would come on top of it.
        def exchanged(branch: str, cut: Any, *told: Any) -> Any:
            if branch != self.branch:
                return saved(branch, cut, *told)
            names = self.field.split(".")
            before.append(reduce(lambda part, name: part and getattr(part, name), names, cut))
            made: Any = self.value
            return launch.put(cut, reduce(lambda part, name: {name: part}, reversed(names), made))

        with patch.object(launch, "_with_choices", exchanged):
            yield before


def cases(shapes: Sequence[tuple[int, int]], only: Sequence[str]) -> list[Case]:
    """All that triton_knobs.yaml asks to try of these kernels, a shape after the other."""
    text = Path(__file__).with_name("triton_knobs.yaml").read_text(encoding="utf-8")
    found = []
    for shape, (branch, knobs) in itertools.product(shapes, yaml.safe_load(text).items()):
        for field, told in knobs.items():
            if only and not set(only).intersection(told["kernels"]):
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


# Cases of one shape follow each other.
@lru_cache(maxsize=1)
def tensors(shape: tuple[int, int]) -> dict[str, Tensor]:
    """Of that batch and length."""
    batch, length = shape
    return inputs(length, torch.bfloat16, "cuda", batch)


@lru_cache(maxsize=1)
def shipped(shape: tuple[int, int]) -> tuple[list[Tensor], set[str]]:
    """What a shape gives as it is, and the kernels that run."""
    x = tensors(shape)
    launched = {one["kernel"] for one in breakdown(sparse(x, "triton"))}
    return computed(x), launched


def measure(case: Case) -> dict[str, Any]:
    """Its line: milliseconds of its kernels, or why there are none."""
    row = case.key | {"kernels": list(case.kernels)}
    x, (truth, launched) = tensors(case.shape), shipped(case.shape)
    if not launched.intersection(case.kernels):
        return row | {"problem": "not launched at this shape"}
    with case.in_force() as before:
        try:
            ours(x, "triton")
            # The last one is of the choice of blocks; operators before it know less of the config.
            row["shipped"] = before[-1] == case.value
            error = largest_error(computed(x), truth)
            found = {one["kernel"]: one["ms"] for one in breakdown(sparse(x, "triton"))}
        except (RuntimeError, ValueError) as problem:  # too much shared memory, no such layout
            return row | {"problem": " ".join(str(problem).split())[:160]}
    time_ms = sum(found[name] for name in case.kernels if name in found)
    return row | {"ms": time_ms, "error": error, "right": error <= _SAME}


def compile_case(case: Case) -> None:
    """Run it once, so that what it compiles lies in Triton's cache."""
    with case.in_force(), suppress(RuntimeError, ValueError):  # measured later, and said there
        computed(tensors(case.shape))


def compile_all(tried: Sequence[Case], processes: int, within_s: float) -> None:
    """All cases, by processes of their own, which are ended after so long."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map_async(compile_case, tried, chunksize=1).wait(within_s)


def by(
    rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Any]
) -> Iterable[tuple[Any, list[dict[str, Any]]]]:
    """The rows of each key, in the order in which keys come first."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found.items()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown: of every knob the shipped value and the best ones."""
    cells = []
    for (shape, branch, field), here in by(rows, lambda row: tuple(row[key] for key in KNOB)):
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


def choices_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of each branch and length that was measured the parts of a cut to exchange: the best value of
    each kernel, where it is worth it.
    """
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "ms" in row:
            made.setdefault(row["branch"], {}).setdefault(row["shape"].partition("x")[2], {})
    right = [row for row in rows if row.get("right")]
    for _, here in by(right, lambda row: (row["shape"], row["kernels"][0])):
        shipped = [row["ms"] for row in here if row["shipped"]]
        best = min(here, key=lambda row: row["ms"])
        if shipped and best["ms"] <= _WORTH * min(shipped):
            part = made[best["branch"]][best["shape"].partition("x")[2]]
            *outer, last = best["field"].split(".")
            for name in outer:
                part = part.setdefault(name, {})
            value = best["value"]
            if isinstance(value, list):
                value = dict(zip(("rows", "warps", "stages"), value, strict=True))
            part[last] = value
    return made


def save(rows: Sequence[dict[str, Any]]) -> None:
    """Into the package's folder, for this device; of other branches, what was there stays."""
    device = torch.cuda.get_device_name()
    path = launch.FOLDER / f"{'-'.join(device.split())}.json"
    choices, untimed = choices_of(rows), []
    if path.is_file():
        before = json.loads(path.read_text("utf-8"))
        untimed = [one for one in before["untimed"] if one.partition(".")[0] not in choices]
        choices = before["choices"] | choices
    document = {
        "device": device,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shapes": launch.shapes_of(CFG, torch.bfloat16.itemsize),
        "choices": choices,
        "untimed": untimed,
    }
    write_atomic(path, json.dumps(document, indent=1) + "\n")


def main(argv: Sequence[str]) -> int:
    """0 all were measured, 1 one computes something else, 75 out of time."""
    program = Program(__doc__)
    add = program.parser.add_argument
    add("--shapes", type=shapes, default=shapes("2x2048,1x32768"), help="BATCHxS,...")
    add("--only", type=names, default=[], help="kernels, comma-separated (default: all)")
    add("--processes", type=int, default=12, help="that compile")
    add("--save", action="store_true", help="write the best into the package")
    args = program.parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: times are what this is about")
    rows, begun = program.rows, time.monotonic()
    known = [{key: row[key] for key in (*KNOB, "value")} for row in rows]
    left = [case for case in cases(args.shapes, args.only) if case.key not in known]
    compile_all(left, args.processes, within_s=program.left_s / 2)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    for case in left:
        if program.left_s < 5:
            program.write("out of time", table(rows), {"rows": rows})
            return TO_BE_CONTINUED
        program.keep(measure(case))
    if args.save:
        save(rows)
    wrong = [row for row in rows if "ms" in row and not row["right"]]
    text = f"{len(rows)} values, {len(wrong)} compute something else"
    program.write(text, table(rows), {"rows": rows, "device": torch.cuda.get_device_name()})
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
