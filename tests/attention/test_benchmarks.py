"""The bound of a kernel's main loop, by which compiled kernels are held to the tensor cores."""

from __future__ import annotations

import pytest

from benchmarks.triton_aot.loops import main_loop
from tests.factory.tables import table

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
