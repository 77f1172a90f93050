"""The Triton kernels, without a GPU: in Triton's interpreter, and compiled for GPUs elsewhere."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.triton_aot.loops import main_loop
from nsa.attention import choose_selected, nsa_attention
from nsa.attention.branches import Branches
from nsa.attention.triton import (
    choose_compressed_cut,
    choose_selected_cut,
    choose_window_cut,
    cost_by_block,
    cost_of_walk,
    cut_by_block,
    register_limit,
    shape_problem,
)
from nsa.config import NSAConfig, Way
from nsa.contract import NSAError
from tests.attention.test_mutants import ROOT, needs_triton
from tests.attention.test_proofs import inputs
from tests.factory.tables import table

CFG = NSAConfig()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was compiled before; products and sums in one instruction, as ever.

    Triton 3.9 warns where the latter is left to its default, and here a warning is an error.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


# What torch 2.11 to 2.13 bring. 3.9.0 spills more (benchmarks/results/triton.md).
HELD_TO = ("3.6", "3.7")
# What every main loop can use of the tensor cores, at least.
BOUND = 0.6


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, None])
@pytest.mark.usefixtures("compiler")
def test_what_the_assembler_makes_of_them(capability: int | None) -> None:
    """Every kernel of the production shape: tensor cores, how much, no spill, no atomic, room.

    Without a capability every choice that is tuned, for that of its device, by the compilers that
    it is held to.
    """
    import triton

    from benchmarks.triton_aot.compiled import compile_all, compile_tuned
    from benchmarks.triton_aot.kernels import PARTS

    if capability is None and not triton.__version__.startswith(HELD_TO):
        pytest.skip(f"Triton {triton.__version__}: choices are held to {' and '.join(HELD_TO)}")
    made = list(compile_all([capability], [64], list(PARTS)) if capability else compile_tuned())
    assert len(made) >= 16 or capability is None
    assert {one.kernel.name: one.problems for _, one in made if one.problems} == {}
    loops = [(one.kernel.name, one.loop) for _, one in made if one.kernel.dots or not capability]
    assert loops and [name for name, loop in loops if loop is None or loop.bound < BOUND] == []
    cores = {(one.capability, op) for _, one in made for op, n in one.tensor_core.items() if n}
    assert cores == {(90, "HGMMA") if capability != 80 else (80, "HMMA")}


@needs_triton
@pytest.mark.usefixtures("compiler")
def test_a_choice_that_spills_is_seen(tmp_path: Path) -> None:
    """Made to fail on purpose: the tile that was fastest on an H200, and spilled."""
    from benchmarks.triton_aot.compiled import choices, compile_kernel
    from nsa.attention.triton import launch

    shipped = launch.measured("NVIDIA H200", "9.0")
    assert shipped is not None
    path, tile = tmp_path / "device.json", {"rows": 128, "warps": 4, "stages": 2}
    for length, parts in shipped["choices"]["selected"].items():
        assert f"selected.{length}.key_gradient" in shipped["untimed"]
        assert parts["key_gradient"] != tile
        parts["key_gradient"] = tile
    path.write_text(json.dumps(shipped))
    one = next(one for one in choices(path) if one[0].name == "dk, dv, 128 rows")
    made = compile_kernel(*one, "bf16")
    assert made.spilled >= 8
    assert made.problems == [f"{made.spilled} bytes of each thread are spilled"]
    path.write_text(json.dumps({**shipped, "shapes": {}}))
    with pytest.raises(ValueError, match="measured for other shapes than the production's"):
        next(choices(path))


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_assembler_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made to fail on purpose: an atomic store, and heads so narrow that each of Hopper's products
    waits for the one before."""
    from benchmarks.triton_aot.compiled import compile_kernel
    from benchmarks.triton_aot.kernels import selected
    from nsa.attention.triton.selected import readers

    kernels = {one.name.partition(",")[0]: one for one in selected(CFG, 2048, 4)}
    source = Path(readers.__file__).read_text()
    changed = source.replace("tl.store(readers +", "tl.atomic_add(readers +")
    (tmp_path / "changed_readers.py").write_text(changed)
    monkeypatch.syspath_prepend(tmp_path)
    atomic = importlib.import_module("changed_readers").list_kernel
    made = compile_kernel(replace(kernels["list (fill)"], function=atomic), 90, "fp32")
    assert made.problems == ["1 atomic operations"]
    keys = kernels["dk"]
    narrow = replace(keys, warps=4, constants=keys.constants | {"D_K": 16, "D_V": 16})
    waiting = compile_kernel(narrow, 90, "bf16")
    assert waiting.problems == ["products of the tensor cores wait for each other"]


@pytest.mark.parametrize("seq_len", [1024, 4096, 8192, 131_072])
def test_blocks_own_the_work_of_long_sequences(seq_len: int) -> None:
    """Their parts take no more than queries and output, or 256 MiB; all pieces have a place."""
    cut = choose_selected_cut(CFG, seq_len, 4)
    assert (cut.by_block is not None) == (seq_len >= 8192)
    # A query comes with half of all blocks, and its own.
    walk = cost_of_walk(CFG, seq_len, 128)
    assert walk == (seq_len / 64 + 1) / 2 < cost_of_walk(CFG, seq_len, 64)
    assert (cost_by_block(CFG, seq_len) < walk) == (cut.by_block is not None)
    run = cut_by_block(CFG, seq_len, 4)
    # Of 2 bytes, and a float32 for each part. One run less would not do.
    part, n_runs = (64 * 2 + 4) * run.places, -(-seq_len // run.tokens)
    room = max(seq_len * 2 * 64 * 2, (256 << 20) / (4 * 6))
    longer = -(-seq_len // (64 * max(1, n_runs - 1))) * 64
    assert run.tokens * part <= room and (n_runs == 1 or room < longer * part)
    assert n_runs == {1024: 1, 4096: 1, 8192: 2, 131_072: 9}[seq_len]
    assert run.tokens - seq_len / n_runs < 64
    blocks, total = CFG.n_blocks(seq_len), run.tokens * run.places
    for counts in ([total // blocks] * blocks, [run.tokens] * run.places):
        for cut_so in (run, replace(run, piece=64)):
            assert sum(-(-count // cut_so.piece) for count in counts) <= cut_so.n_pieces


@pytest.mark.parametrize("seq_len", [1, 63, 2048, 4099, 131_072])
def test_pieces_are_enough_for_any_lists(seq_len: int) -> None:
    """All readers in few blocks, or spread evenly: each list's pieces have a place."""
    cut = choose_selected_cut(CFG, seq_len, 4)
    # Float32 of 64 keys beside 6 heads of 2 bytes, or as few as leave the device something to do.
    assert 64 * 4 * cut.n_pieces <= seq_len * 6 * 2 or 4 * cut.n_pieces < 2 * 1024
    blocks, total = CFG.n_blocks(seq_len), seq_len * min(CFG.n_sel, CFG.n_blocks(seq_len))
    for counts in ([total // blocks] * blocks, [min(seq_len, total)] * (total // seq_len)):
        assert sum(-(-count // cut.piece) for count in counts) <= cut.n_pieces
    # Every key is in a tile and every token in a piece; partial sums stay below 1 GiB.
    compressed = choose_compressed_cut(CFG, seq_len, 4)
    n_keys = CFG.n_compressed(seq_len)
    n_tiles, n_pieces = compressed.n_tiles(n_keys), compressed.n_pieces(seq_len)
    assert n_tiles * compressed.owned >= n_keys and n_pieces * compressed.piece >= seq_len
    assert n_tiles * n_pieces * 4 * compressed.owned * (CFG.d_k + CFG.d_v) * 4 < 1 << 30


@table(__file__, "shapes")
def test_shapes(change: dict[str, int], seq_len: int | None, why: str | None) -> None:
    found = shape_problem(NSAConfig(**{**vars(CFG), **change}), seq_len)
    assert found is None if why is None else why in str(found)


def test_the_choice_says_why() -> None:
    cpu, kind = torch.device("cpu"), torch.bfloat16
    choice = choose_selected(CFG, "auto", dtype=kind, device=cpu)
    assert (choice.value, choice.reason) == ("sdpa", "Triton needs a CUDA device, this is cpu")
    off = choose_selected(CFG, "0", dtype=kind, device=cpu)
    assert (off.value, off.reason) == ("sdpa", "Triton kernels are switched off")
    with pytest.raises(NSAError, match="NSA_USE_TRITON_SEL=1: Triton needs a CUDA device"):
        choose_selected(CFG, "1", dtype=kind, device=cpu)
    with pytest.raises(NSAError, match="kernels='triton': Triton needs a CUDA device"):
        nsa_attention(Branches(**inputs(CFG, 12)), CFG, Way(kernels="triton"))


def test_nothing_imports_triton_before_it_is_needed() -> None:
    """nsa works where triton is not installed."""
    code = "import sys; sys.modules['triton'] = None; import nsa, nsa.model, nsa.step.engine"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@table(__file__, "walks")
def test_pieces_of_walks_by_hand(seq_len: int, pairs: int, pieces: int) -> None:
    """As many as give a device 256 programs, of four tiles each at least; S cuts walks short."""
    assert choose_window_cut(CFG, seq_len, pairs).pieces == pieces


def test_blackwell_is_given_all_registers() -> None:
    assert [register_limit(major) for major in (8, 9, 10, 12)] == [None, None, 255, 255]


# Nothing around counts: not what comes before, a loop without products, the loop around, the end.
LOOPS = """
kernel:
        /*0000*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT ;
.L_x_0:
        /*0010*/                   MUFU.EX2 R1, R1 ;
.L_x_1:
        /*0020*/                   MUFU.EX2 R1, R1 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
{body}
        /*00e0*/              @!P0 BRA `(.L_x_2) ;
        /*00f0*/               @P1 BRA `(.L_x_0) ;
.L_x_3:
        /*0100*/                   BRA `(.L_x_3);
"""
LINE = "        /*0040*/                   {} ;"


def loop_of(capability: int, *instructions: str):
    body = "\n".join(LINE.format(one) for one in instructions)
    return main_loop(LOOPS.replace("{body}", body), capability)


@table(__file__, "rounds")
def test_a_round_takes_what_its_busiest_part_takes(
    capability: int, body: dict[str, int], tensor: float, bound: float, by: str
) -> None:
    instructions = [one for one, count in body.items() for _ in range(count)]
    loop = loop_of(capability, *instructions)
    assert loop is not None and loop.instructions == len(instructions) + 1
    assert loop.tensor == pytest.approx(tensor)
    assert (loop.bound, loop.busiest) == (pytest.approx(bound), by)


def test_a_kernel_that_multiplies_nowhere_in_a_loop_has_no_main_loop() -> None:
    assert loop_of(90, "FADD R1, R1, R2") is None
