"""The compressed branch's Triton kernels, without a GPU, as in `test_triton`."""

from __future__ import annotations

import json

import pytest

import nsa
from nsa.attention.triton.compressed_tiles import choose_compressed_cut, places
from nsa.attention.triton.tiles import shape_problem
from tests.attention.triton_compressed_mutants import IN_32_BITS, MUTANTS, RACES
from tests.attention.triton_process import found, interpreted, needs_triton

CFG = nsa.NSAConfig()
OF = "triton_compressed_in_interpreter"
PROOFS = (
    "compressed_values",
    "compressed_tuned",
    "compressed_shapes",
    "ties",
    "compressed_same_bits",
    "compressed_operator",
    "compressed_far_apart",
    "self_tested",
)


@needs_triton
@pytest.mark.slow
def test_the_kernels_compute_the_equations() -> None:
    assert found(*PROOFS, of=OF) == {name: [] for name in PROOFS}


@needs_triton
@pytest.mark.slow
def test_planted_defects_of_kernels_are_seen() -> None:
    """Each in a copy of its own; the control, which changes nothing, is seen as nothing."""
    told = found(*MUTANTS, of=OF)
    assert {name for name, problems in told.items() if not problems} == {"compressed_control"}
    for name in RACES:
        assert any("more than one writer" in text for text in told[name])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_32_BITS)
def test_offsets_of_32_bits_are_seen(name: str) -> None:
    """They wrap around: other numbers are read, or nobody's."""
    ran = interpreted(name, of=OF)
    assert ran.returncode < 0 or json.loads(ran.stdout)[name], ran.stderr


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_spill_of_the_choice_is_seen() -> None:
    """Made to fail on purpose: too few warps for what is kept sorted."""
    from dataclasses import replace

    from benchmarks.grids.compressed import kernels
    from benchmarks.triton_aot import compile_kernel

    top = next(one for one in kernels(CFG, 2048, 4) if one.name.startswith("top blocks"))
    greedy = compile_kernel(replace(top, warps=2), 80, "bf16")
    assert any("are spilled" in text for text in greedy.problems), greedy


@pytest.mark.parametrize("seq_len", [1, 63, 2048, 4099, 131_072])
def test_pieces_and_tiles_hold_everything(seq_len: int) -> None:
    """Every key is in a tile and every token in a piece; partial sums stay below 1 GiB."""
    cut = choose_compressed_cut(CFG, seq_len, 4)
    n_keys = CFG.n_compressed(seq_len)
    assert (
        cut.n_tiles(n_keys) * cut.owned >= n_keys and cut.n_pieces(seq_len) * cut.piece >= seq_len
    )
    tiles = cut.n_tiles(n_keys) * cut.n_pieces(seq_len) * 4
    assert tiles * cut.owned * (CFG.d_k + CFG.d_v) * 4 < 1 << 30
    assert cut.blocks >= places(CFG) >= CFG.n_sel


def test_work_counted_over_the_grid() -> None:
    """By hand: at S=2048 the last tile of 128 rows walks over four tiles of 32 keys.

    Each score is three products of bf16.
    """
    from benchmarks.grids.compressed import work

    forward, top, dq, dkv = work(CFG, 2048)
    seen = [max(0, (min((128 * (n + 1) - 1) // 6, 2047) - 31) // 16 + 1) for n in range(96)]
    walked = sum(-(-n // 32) for n in seen) * 2
    assert forward.flops == 2 * walked * 128 * 32 * (3 * 64 + 64)
    assert forward.needed == 2 * 12 * 128 * sum(max(0, (t - 31) // 16 + 1) for t in range(2048))
    # Tokens from 1,024 on choose, 16 tiles of 64: 32 blocks by five offsets and six heads.
    assert top.flops == 2 * 16 * 2 * 6 * 5 * 64 * 32 * 3 * 64
    assert all(one.least < one.most for one in (forward, top, dq, dkv))


def test_more_blocks_than_are_kept_sorted() -> None:
    many = nsa.NSAConfig(n_sel=65)
    assert shape_problem(many) == "n_sel=65: the kernels take up to 64"
