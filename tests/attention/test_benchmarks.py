"""What benchmarks of kernels say: the bound of a main loop, and a peer beside ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks import attention_gpu
from benchmarks.attention.checks import BOUND, beside_masks, check_peer, inputs, ours
from benchmarks.attention.peers import PEERS, Peer, find_peer, window
from benchmarks.triton_aot.loops import main_loop
from nsa.attention import nsa_attention
from nsa.attention.triton.tiles import shape_problem

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
TF32 = "HMMA.1688.F32.TF32 R4, R8, R12, R4"


@pytest.mark.parametrize(
    ("capability", "body", "tensor", "bound", "by"),
    [
        (90, [WIDE], 64, 1.0, "tensor"),
        # With the branch, as many instructions as cycles, then twice as many.
        (90, [WIDE] + ["NOP"] * 62, 64, 1.0, "issue"),
        (90, [WIDE] + ["NOP"] * 126, 64, 0.5, "issue"),
        (90, [WIDE] + ["MUFU.EX2 R1, R1"] * 16, 64, 0.5, "special"),
        (90, [WIDE] + ["@P0 LDS.128 R4, [R8]"] * 32, 64, 0.5, "memory"),
        (90, [WIDE] + ["IADD3 R1, R1, R2, RZ"] * 64, 64, 0.5, "integer"),
        (90, [SMALL] * 10, 40, 0.62, "tensor"),
        (80, [SMALL] * 10, 80, 1.0, "tensor"),
        (80, [HALF] * 10, 40, 1.0, "tensor"),
        (80, [TF32] * 10, 80, 1.0, "tensor"),
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


def test_of_two_loops_the_one_with_more_products_is_the_main_one() -> None:
    first = loop_of(90, WIDE, *["NOP"] * 200)
    two = LOOPS.replace("{body}", LINE.format(WIDE) + "\n" + LINE.format(WIDE))
    more = two.replace(".L_x_", ".L_x_9").replace("kernel:", "")
    both = LOOPS.replace("{body}", "\n".join(LINE.format(x) for x in (WIDE, *["NOP"] * 200)))
    found = main_loop(both + more, 90)
    assert first is not None and found is not None
    assert (first.tensor, found.tensor, found.bound) == (64, 128, 1.0)


def off_by_a_tenth(**given: object) -> Tensor:
    """Attention that is wrong."""
    out: Tensor = nsa_attention(**given) * 1.1  # type: ignore[arg-type]
    return out


def of_another_shape(**given: object) -> Tensor:
    return torch.zeros(1, 2)


def test_peers_are_held_against_the_reference_timed_and_never_decide() -> None:
    right = "peer nsa.attention:nsa_attention"
    peers = {
        right: find_peer("nsa.attention:nsa_attention"),
        "peer wrong": find_peer(f"{__name__}:off_by_a_tenth"),
        "peer shape": Peer(run=of_another_shape),
        "peer absent": Peer(run=nsa_attention, modules=("no_such_package.ops",)),
        "peer broken": Peer(run=breaks),
        "peer fla": PEERS["fla"],
        "peer lucidrains": PEERS["lucidrains"],
    }
    rows = {row["arm"]: row for row in attention_gpu.measure(70, "cpu", 1, 64, peers)}
    assert set(rows) == {"nsa", *peers, "dense"}
    assert rows[right]["right"] and rows[right]["total_ms"] > 0
    assert not rows["peer wrong"]["right"] and rows["peer wrong"]["error"] > 0.05
    assert not any(attention_gpu.is_wrong(row) for row in rows.values())
    table = attention_gpu.table([*rows.values(), {**rows["peer fla"], "seq_len": 80}])
    assert "WRONG" in table
    for line in (
        "| 12/2/64 | 70 | peer shape | - | - | - | - | - | the output has shape (1, 2), not",
        "| peer absent | - | - | - | - | - | not installed: No module named 'no_such_package'",
        "| peer broken | - | - | - | - | - | AssertionError |",
        "| 12/2/64 | 70, 80 | peer fla | - | - | - | - | - | takes only 16, 32, 64,",
        "| peer lucidrains | - | - | - | - | - | takes only 1, 2, 4, 8, 16",
    ):
        assert line in table


def breaks(**given: object) -> Tensor:
    raise AssertionError


def prefers_the_least(gates: Tensor, k_cmp: Tensor, **given: object) -> Tensor:
    """The branches are right, the choice of blocks is not."""
    others = torch.tensor([0.0, 1.0, 1.0])
    out: Tensor = nsa_attention(gates=gates * others, k_cmp=-k_cmp, **given)  # type: ignore[arg-type]
    return out + nsa_attention(gates=gates * (1 - others), k_cmp=k_cmp, **given)  # type: ignore[arg-type]


def test_a_peer_is_right_where_it_has_no_choice_and_told_how_often_elsewhere() -> None:
    x = inputs(1200, torch.float32, "cpu", cfg=attention_gpu.config_of("2/1/16"))
    for run, least, most in ((nsa_attention, 0.999, 1), (prefers_the_least, 0.85, 0.95)):
        error, compared = check_peer(x, 1200, Peer(run=run))
        assert error <= BOUND[torch.float32]
        assert compared.startswith("outputs of the first 1024, which take all blocks; ")
        assert least <= float(compared.split("; ")[1].partition("%")[0]) / 100 <= most
    assert check_peer(x, 1200, Peer(run=off_by_a_tenth))[0] > 0.05
    # With gradients, by its own equations, and without an effect of one input.
    short = {name: value[:, :300].detach().requires_grad_() for name, value in x.items()}
    whole = Peer(run=nsa_attention, own_cfg=lambda cfg: replace(cfg, l=cfg.l_sel, d=cfg.l_sel))
    error, compared = check_peer(short, 1200, whole)
    assert error <= BOUND[torch.float32] and compared == "outputs and gradients"
    other = Peer(run=lambda cfg, **given: nsa_attention(cfg=whole.own_cfg(cfg), **given))
    assert check_peer(short, 1200, other)[0] > 0.05
    blind = Peer(run=lambda k_win, **given: nsa_attention(k_win=k_win.detach(), **given))
    assert check_peer(short, 1200, blind)[0] == 1


def test_beyond_the_reference_kernels_are_held_against_masks() -> None:
    x = inputs(70, torch.float32, "cpu")
    (right, blocks), (other, _) = (ours(x, "masked") for _ in range(2))
    assert beside_masks(x, right, blocks) == 0
    assert beside_masks(x, other * 1.1, blocks) > 0.05


def test_the_window_of_peers_is_ours() -> None:
    cfg = replace(attention_gpu.config_of("4/2/16"), w=40)
    x = inputs(70, torch.float32, "cpu", cfg=cfg)
    only = x | {"gates": torch.tensor([0.0, 0.0, 1.0]).expand(1, 70, 4, 3)}
    parts = (x["q"][0], x["k_win"][0], x["v_win"][0])
    torch.testing.assert_close(window(*parts, 40)[None], nsa_attention(**only, cfg=cfg))
    assert not torch.allclose(window(*parts, 41)[None], nsa_attention(**only, cfg=cfg))


def test_a_shape_is_heads_groups_and_width() -> None:
    """What public kernels are timed at, beside the production's; each row says which it is."""
    rows = attention_gpu.measure(70, "cpu", 1, 64, {}, "32/2/128")
    assert {row["shape"] for row in rows} == {"32/2/128"}
    assert all(row["right"] for row in rows), rows
    assert "70 of 32/2/128: " in attention_gpu.summary(rows)
    cfg = attention_gpu.config_of("64/4/128")
    assert (cfg.n_heads, cfg.n_kv_groups, cfg.d_k, cfg.d_v) == (64, 4, 128, 128)
    assert shape_problem(cfg, 65_536) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no_such_module:attend", "No module named 'no_such_module'"),
        ("flash", "give flash-nsa, fla, fsa, xunhao, liger, lucidrains or module:callable"),
        ("nsa.attention:no_such", "has no attribute 'no_such'"),
        ("nsa.attention", "module is not callable; give flash-nsa"),
        ("nsa.attention:__name__", "str is not callable"),
        (":attend", "invalid format: ':attend'; give flash-nsa"),
    ],
)
def test_what_is_no_peer_is_said_before_anything_runs(text: str, why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        attention_gpu.main(["--out", "unused", "--device", "cpu", "--peers", text])
