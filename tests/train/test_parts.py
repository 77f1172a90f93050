"""The trainer's small parts, each against its definition."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from nsa.settings import ConfigError
from nsa.train.audit import kernel_name, operators_by_branch
from nsa.train.book import halt_reason
from nsa.train.clock import StepClock
from nsa.train.compress import WireStats
from nsa.train.engine import learning_rate
from nsa.train.envfile import redact
from nsa.train.files import LineFile, RecordWriteError, plain, write_json
from nsa.train.profiling import covered
from nsa.train.ranks import parameter_hash
from nsa.train.rundir import claim, leftovers
from tests.train.launching import environment


def rate(step: int, shape: str = "cosine") -> float:
    return learning_rate(step, peak=1.0, warmup_steps=10, total_steps=110, shape=shape)


def test_warm_up_is_linear_in_optimizer_steps() -> None:
    assert [rate(step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_cosine_falls_to_a_tenth_at_the_last_step() -> None:
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == pytest.approx(0.1) == rate(500)
    assert rate(35) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))


def test_constant_stays() -> None:
    assert rate(110, "constant") == 1.0


def test_no_warm_up_starts_at_the_peak() -> None:
    found = learning_rate(1, peak=2.0, warmup_steps=0, total_steps=1000, shape="cosine")
    assert found == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize(
    ("ops", "kernel"),
    [
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "flash"),
        (["aten::_scaled_dot_product_flash_attention"], "flash"),
        (["aten::_scaled_dot_product_efficient_attention"], "efficient"),
        (["aten::_scaled_dot_product_cudnn_attention"], "cudnn"),
        (["aten::_scaled_dot_product_attention_math", "aten::_softmax"], "math"),
        (["aten::_softmax"], "explicit_softmax"),
        (["aten::exp_"], "explicit_softmax"),
        (["nsa::selected"], "triton"),
        ([], "none"),
    ],
)
def test_kernels_are_named_by_their_operators(ops: list[str], kernel: str) -> None:
    assert kernel_name(Counter(ops)) == kernel


def test_two_kernels_in_one_branch_are_both_named() -> None:
    ops = ["aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_attention_math"]
    assert kernel_name(Counter(ops)) == "flash+math"


def test_operators_outside_a_branch_are_not_counted() -> None:
    x = torch.randn(1, 1, 4, 8)
    with torch.profiler.profile() as profiler:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        with torch.profiler.record_function("nsa.win"):
            x.softmax(-1)
    ops = operators_by_branch(profiler.events())
    assert kernel_name(ops["win"]) == "explicit_softmax"
    assert kernel_name(ops["sel"]) == "none"


def test_covered_is_the_length_of_the_union() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert covered([]) == 0


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("--local-path=/data/x", "--local-path=/data/x"),
        ("API_KEY=abc123", "API_KEY=[redacted]"),
        ("https://user:pw@host/x", "https://[redacted]@host/x"),
        ("hf_abcdefghij123", "[redacted]"),
        ("HF_AUTH=abc123", "HF_AUTH=[redacted]"),
        ("data.tokenizer=byte", "data.tokenizer=byte"),
        ("--auth=abc123", "--auth=[redacted]"),
        ("token=a b", "token=[redacted] b"),
    ],
)
def test_secrets_are_redacted(text: str, clean: str) -> None:
    assert redact(text) == clean


def test_json_holds_no_bare_nan() -> None:
    assert plain({"a": float("nan"), "b": -math.inf, "c": 1.5, "d": None}) == {
        "a": "nan",
        "b": "-inf",
        "c": 1.5,
        "d": None,
    }


def test_line_files_are_never_shared(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    LineFile(path).append("one")
    with pytest.raises(FileExistsError):
        LineFile(path)
    assert path.read_text() == "one\n"


def test_a_full_disk_is_named() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    file = LineFile.__new__(LineFile)
    file.path, file._fd = full, os.open(full, os.O_WRONLY)
    with pytest.raises(RecordWriteError, match="cannot write /dev/full: No space left on device"):
        file.append("row")
    os.close(file._fd)


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "no_such_folder" / "env.json"
    with pytest.raises(RecordWriteError, match=r"env\.json"):
        write_json(path, {})
    write_json(tmp_path / "env.json", {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["env.json"]


@pytest.mark.parametrize(
    "name", ["training.csv", ".HALT", ".ENOUGH", "heartbeat_rank0.jsonl", "env.json"]
)
def test_a_directory_with_traces_of_a_launch_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"belongs to an earlier launch"):
        claim(tmp_path, 2)


def test_the_harness_own_files_are_no_traces(tmp_path: Path) -> None:
    for name in ("launch.json", "console.log", "heartbeat_rank1.jsonl"):
        (tmp_path / name).touch()
    assert leftovers(tmp_path, world_size=2) == []
    assert leftovers(tmp_path, world_size=1) == ["heartbeat_rank1.jsonl"]


def test_parameter_hash_sees_one_bit() -> None:
    one = torch.nn.Linear(3, 3)
    before = parameter_hash(one)
    assert before == parameter_hash(one)
    with torch.no_grad():
        one.bias[0] = torch.nextafter(one.bias[0], torch.tensor(10.0))
    assert parameter_hash(one) != before


def test_wire_statistics_start_again_after_each_reading() -> None:
    stats = WireStats(wire_dtype=torch.bfloat16, world_size=2)
    stats.bytes_before, stats.bytes_after = 8, 4
    assert stats.take()["bytes_before"] == 8
    assert stats.take()["bytes_before"] == 0


def test_the_clock_splits_a_step_into_parts_and_the_hosts_own_time() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    with clock.part("fetch"):
        time.sleep(0.03)
    time.sleep(0.05)
    mark = clock.tick()
    assert mark.seconds() == pytest.approx(0.08, abs=0.03)
    assert mark.fetch_s == pytest.approx(0.03, abs=0.02)
    assert mark.host_s == pytest.approx(mark.seconds() - mark.fetch_s, abs=1e-3)


def test_restart_leaves_out_what_came_before() -> None:
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.1)
    clock.restart()
    assert clock.tick().seconds() < 0.05


def test_the_halt_files_first_line_is_the_reason(tmp_path: Path) -> None:
    path = tmp_path / ".HALT"
    assert halt_reason(path) == ".HALT"
    path.write_text("heartbeat stall\nmore\n")
    assert halt_reason(path) == ".HALT (heartbeat stall)"


def test_start_up_loads_only_what_is_used() -> None:
    code = (
        "import sys, nsa.train.session\n"
        "heavy = {'tensorboard', 'datasets', 'tiktoken', 'pyarrow', 'pandas', 'scipy', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
