"""One table for every NSA_* variable, and a message for everything that is not in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nsa import torch_env
from nsa.contract import NCCL_FLIGHTS, NSAError
from nsa.toggles import TOGGLES, parse_toggles, with_safe_mode

ROOT = Path(__file__).resolve().parents[2]


def test_watchdog_defaults() -> None:
    found = {n.removeprefix("NSA_WATCH_"): t.default for n, t in TOGGLES.items() if "WATCH" in n}
    assert found == {
        "HEARTBEAT_STALL_S": 180,
        "FLATLINE_N": 4,
        "GATE_COLLAPSE_N": 3,
        "GATE_ENTROPY_MIN": 0.2,
        "GATE_MAX_THRESHOLD": 0.9,
        "INTERVAL_S": 30,
        "HALT": True,
    }


def test_everything_wrong_is_in_one_message() -> None:
    with pytest.raises(NSAError) as caught:
        parse_toggles(
            {
                "NSA_DDP_BUCKET": "25",
                "NSA_OPT_FUSED": "maybe",
                "NSA_DDP_COMPRESS": "int8",
                "NSA_ACCUM": "0",
                "NSA_LR": "nan",
            }
        )
    text = str(caught.value)
    assert "5 problem(s)" in text
    assert "NSA_DDP_BUCKET: no such toggle; did you mean NSA_DDP_BUCKET_MB?" in text
    assert "NSA_OPT_FUSED='maybe': allowed is 0 or 1" in text
    assert "NSA_DDP_COMPRESS='int8': allowed is off, bf16, fp16" in text
    assert "NSA_ACCUM='0': allowed is a whole number >= 1" in text
    assert "NSA_LR='nan'" in text


def test_origin_bad_values_are_not_swallowed() -> None:
    """The origin read an unreadable number as the default."""
    for name, row in TOGGLES.items():
        with pytest.raises(NSAError, match=name):
            row.parse("not a value")


@pytest.mark.parametrize("name", sorted(TOGGLES))
def test_every_toggle_has_its_default_and_says_where_a_value_came_from(name: str) -> None:
    row = TOGGLES[name]
    text, value = {"bool": ("on", True), "int": ("7", 7), "float": ("0.5", 0.5)}.get(
        row.kind, row.choices[-1:] * 2
    )
    if name in ("NSA_SCALER_GROWTH_FACTOR", "NSA_SCALER_INIT_SCALE"):
        text, value = "3.5", 3.5
    assert parse_toggles({}).values[name] == row.default
    told = {line["name"]: line for line in parse_toggles({name: text}).describe()}[name]
    assert (told["source"], told["value"]) == ("environment", value)
    assert row.meaning and row.requirement


def test_origin_nothing_else_reads_nsa_variables() -> None:
    """The origin read 144 names in 354 places."""
    reads = re.compile(r"(?:environ|getenv)\s*[\[(.][^\n]{0,40}NSA_")
    assert reads.search('x = os.environ.get("NSA_LR")')
    for part in ("nsa", "runbook", "phases", "reports"):
        for path in (ROOT / part).rglob("*.py"):
            assert "tests" in path.parts or not reads.search(path.read_text()), path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("SDPA_FLASH_ONLY=1 SDPA_NO_FLASH=1", "exclude each other"),
        ("DDP_SAFE_MODE=1 DDP_COMPRESS=bf16", "NSA_DDP_COMPRESS"),
        ("CUDA_GRAPHS=1 SEL_RANGES_V2=0", "NSA_CUDA_GRAPHS=1 .*exclude each other"),
        ("CUDA_GRAPHS=1 DDP_SAFE_MODE=1", "NSA_CUDA_GRAPHS=1 .*exclude each other"),
        ("COMPILE=layer DDP_SAFE_MODE=1", "exclude each other"),
    ],
)
def test_contradictions_are_errors(words: str, said: str) -> None:
    with pytest.raises(NSAError, match=said):
        parse_toggles(dict(f"NSA_{word}".split("=") for word in words.split()))


def test_safe_mode_spells_out_what_it_means() -> None:
    safe = with_safe_mode(parse_toggles({"NSA_DDP_SAFE_MODE": "1"}))
    assert safe.flag("NSA_SDPA_NO_FLASH")
    assert safe.sources["NSA_DDP_COMPRESS"] == "NSA_DDP_SAFE_MODE"


def _mapped(*words: str, uses_nccl: bool = True) -> list[str]:
    environ = dict(word.split("=") for word in words)
    rows, problems = torch_env.plan(environ, uses_nccl=uses_nccl)
    assert problems == []
    torch_env.translate(rows, environ)
    assert environ.pop("KINETO_LOG_LEVEL") == "99"
    return [f"{name}={value}" for name, value in environ.items()]


@pytest.mark.parametrize(
    ("given", "mapped"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING=1", ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3"]),
        # torchrun has set the new name by itself; the recorder needs 3.
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=1", ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3"]),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
         ["PYTORCH_ALLOC_CONF=expandable_segments:True"]),
        ("NCCL_BLOCKING_WAIT=1", []),
        ("NCCL_ALGO=Ring", ["NCCL_ALGO=Ring"]),
        ("CUDA_VISIBLE_DEVICES=0,1", ["CUDA_VISIBLE_DEVICES=0,1"]),
    ],
)  # fmt: skip
def test_origin_old_spellings_reach_the_names_that_torch_reads(
    given: str, mapped: list[str]
) -> None:
    """NCCL_ASYNC_ERROR_HANDLING and PYTORCH_CUDA_ALLOC_CONF do nothing in torch 2.13."""
    assert _mapped(given) == mapped


def test_debug_detail_never_reaches_ddp_on_gloo() -> None:
    detail = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    assert _mapped(detail, uses_nccl=False) == ["TORCH_DISTRIBUTED_DEBUG=INFO"]
    assert _mapped(detail) == [detail]


def test_nccls_watchdog_writes_its_record_of_a_hang_where_it_is_looked_for() -> None:
    prefix = f"/runs/x/{NCCL_FLIGHTS.stem}"
    dumps = torch_env.flight_dumps(prefix)
    assert dumps["TORCH_FR_DUMP_TEMP_FILE"] == prefix and int(dumps["TORCH_FR_BUFFER_SIZE"]) > 0
    assert dumps["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_both_names_of_the_allocator_are_an_error() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}
    assert "alias" in torch_env.plan(both, uses_nccl=True)[1][0]


def test_every_change_is_noted() -> None:
    for name in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "PYTORCH_CUDA_ALLOC_CONF"):
        rows, _ = torch_env.plan({name: "1"}, uses_nccl=True)
        assert rows[0].note
