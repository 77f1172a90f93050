"""What is computed about kernels: the page's tables, and counts of instructions, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import nsa
from benchmarks import triton_roofline
from benchmarks.grids import GPUS, Work, selected
from benchmarks.sass import loops
from nsa.attention.triton.selected.tiles import choose_cut

CFG = nsa.NSAConfig()
# Two turns' worth of a loop of Hopper, and what is around it.
_HOPPER = """
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0020*/                   MUFU.EX2 R1, R2 ;
        /*0030*/              @!P1 FFMA R1, R2, R3, R4 ;
        /*0040*/                   ISETP.GE.AND P0, PT, R1, R2, PT ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
"""
_COPY = """
.L_x_1:
        /*0010*/                   LDG.E.128 R4, [R2.64] ;
        /*0020*/                   STG.E.128 [R2.64], R4 ;
        /*0030*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
"""


def test_the_page_shows_what_the_tool_computes() -> None:
    """Written by `python -m benchmarks.triton_roofline --write benchmarks/results/triton.md`."""
    text = (Path(__file__).resolve().parents[2] / "benchmarks/results/triton.md").read_text()
    assert triton_roofline.rewritten(text) == text


def test_dense_attention_by_hand() -> None:
    """Two tokens see three pairs: two products forward, five backward, 64 wide, 12 heads."""
    forward, backward = triton_roofline.dense(CFG, 2)
    assert forward.flops == 3 * 12 * 2 * 64 * 2
    assert backward.flops == 3 * 12 * 2 * 64 * 5
    # q and out of 12 heads, k and v of 2, 64 numbers of 2 bytes; a sum of 4 bytes for each head.
    assert forward.least == 2 * (2 * 12 * 64 * 2 + 2 * 2 * 64 * 2 + 12 * 4)


def test_a_kernel_takes_the_longer_of_its_two_times() -> None:
    products = Work(kernel="a", backward=False, flops=312e9, needed=0, least=0, most=0)
    moved = Work(kernel="b", backward=True, flops=0, needed=0, least=2039e6, most=3 * 2039e6)
    both = triton_roofline.seconds([products, moved], "A100 SXM")
    assert both == pytest.approx((2e-3, 4e-3))


def test_no_part_of_training_is_left_out() -> None:
    found = triton_roofline.of_training(CFG, 2048)
    assert {"selected", "window"} <= set(found)
    for works in found.values():
        assert any(one.backward for one in works) and not all(one.backward for one in works)


@pytest.mark.parametrize("seq_len", [2048, 8192, 65_536])
def test_the_form_that_is_chosen_takes_less_by_the_roofline(seq_len: int) -> None:
    """At both ends of the bytes, on each GPU."""
    walking, by_block = (list(works) for works in selected.forms(CFG, seq_len))
    taken = choose_cut(CFG, seq_len, CFG.n_kv_groups).by_block
    for gpu in GPUS:
        walks, owns = (triton_roofline.seconds(works, gpu) for works in (walking, by_block))
        assert all(
            (own < walk) == (taken is not None) for own, walk in zip(owns, walks, strict=True)
        )


def test_cycles_of_a_loop_by_hand() -> None:
    """64 x 64 x 16 products by four parts that do 512 in a cycle; one special function takes 8."""
    (loop,) = loops(_HOPPER, 90)
    assert loop.products and loop.cycles["tensor"] == 64 * 64 * 16 / 4 / 512
    assert (loop.cycles["special"], loop.cycles["float"], loop.cycles["other"]) == (8, 1, 2)
    assert (loop.cycles["start"], loop.longest, loop.best) == (5, "tensor", 1)
    assert loop.worst == pytest.approx(32 / 37)
    line = "        /*0020*/                   MUFU.EX2 R1, R2 ;\n"
    (slow,) = loops(_HOPPER.replace(line, line * 8), 90)
    assert (slow.longest, slow.best) == ("special", 0.5)


def test_bytes_of_shared_memory_by_hand() -> None:
    """One, two or four matrices of 8 x 8 numbers of 2 bytes; 128 bytes in a cycle for all parts."""
    names = ("LDSM.16.M88", "LDSM.16.MT88.2", "LDSM.16.M88.4", "LDS.128")
    text = "".join(f"        /*0010*/                   {name} R4, [R2] ;\n" for name in names)
    (loop,) = loops(_HOPPER.replace(".L_x_1:\n", f".L_x_1:\n{text}"), 90)
    assert loop.cycles["shared"] == 4 * (128 + 256 + 512 + 512) / 128


def test_a_loop_that_copies_is_held_against_memory() -> None:
    (loop,) = loops(_COPY, 80)
    per_cycle = 2039e9 / 108 / 1.41e9 / 4
    assert not loop.products and loop.longest == "memory"
    assert loop.cycles["memory"] == pytest.approx(2 * 32 * 16 / per_cycle)
    assert loop.best == 1 and loop.worst == pytest.approx(loop.bound / (loop.bound + 4))
