"""The bound of a kernel's main loop, by which compiled kernels are held to the tensor cores."""

from __future__ import annotations

import pytest

from benchmarks.triton_aot.loops import main_loop

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


# 64 x 128 x 16 products are 262,144 FLOPs, 64 cycles of 4,096.
WIDE = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT"
# A warp's 16 x 8 x 16 are 4,096 FLOPs; four parts do 16,384: 8 cycles of 2,048, 4 of 4,096.
SMALL = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
HALF = "HMMA.1688.F32.BF16 R4, R8, R12, R4"


@pytest.mark.parametrize(
    ("capability", "body", "tensor", "bound", "by"),
    [
        (90, [WIDE], 64, 1.0, "tensor"),
        # With the branch, as many instructions as cycles, then twice as many.
        (90, [WIDE] + ["NOP"] * 126, 64, 0.5, "issue"),
        (90, [WIDE] + ["MUFU.EX2 R1, R1"] * 16, 64, 0.5, "special"),
        (90, [WIDE] + ["@P0 LDS.128 R4, [R8]"] * 32, 64, 0.5, "memory"),
        (90, [WIDE] + ["IADD3 R1, R1, R2, RZ"] * 64, 64, 0.5, "integer"),
        (80, [SMALL] * 10, 80, 1.0, "tensor"),
        (80, [HALF] * 10, 40, 1.0, "tensor"),
        (80, [SMALL] * 10 + ["FFMA R1, R1, R2, R3"] * 80, 80, 0.5, "float"),
    ],
)  # fmt: skip
def test_a_round_takes_what_its_busiest_part_takes(
    capability: int, body: list[str], tensor: float, bound: float, by: str
) -> None:
    loop = loop_of(capability, *body)
    assert loop is not None
    assert loop.instructions == len(body) + 1
    assert loop.tensor == pytest.approx(tensor)
    assert (loop.bound, loop.busiest) == (pytest.approx(bound), by)


def test_a_kernel_that_multiplies_nowhere_in_a_loop_has_no_main_loop() -> None:
    assert loop_of(90, "FADD R1, R1, R2") is None
