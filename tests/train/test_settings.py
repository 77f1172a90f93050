"""Strict configs and toggles: one table for each, and everything that is wrong in one message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nsa import torch_env
from nsa.config import parameter_count
from nsa.contract import NCCL_FLIGHTS, NSAError
from nsa.launch.plan import LaunchPlan, plan_launch
from nsa.settings import ConfigError, load_config
from nsa.strict_yaml import load_strict
from nsa.toggles import TOGGLES, parse_toggles, with_safe_mode
from tests.factory.tables import table
from tests.train.conftest import edited
from tests.train.launching import ROOT, SMOKE, schedule

CONFIGS = ROOT / "configs"


def test_yaml_traps() -> None:
    data, problems = load_strict("a: off\nb: 1e-4\nc: 010\nd: yes\ne: true\nf: 1_000\na: 2\n")
    assert data == {"a": 2, "b": 1e-4, "c": "010", "d": "yes", "e": True, "f": 1000}
    assert problems == ["line 7: key 'a' repeats line 1"]


@table(__file__, "tags")
def test_a_tag_is_refused_where_it_stands(value: str) -> None:
    said = f"not valid YAML: line 2: the tag {value.split()[0]} is not read; write the value alone"
    assert load_strict(f"a: 1\nb: {value}\n") == (None, [said])


def test_the_production_config_is_the_documented_one() -> None:
    config = load_config(CONFIGS / "m7c_125m_2xa100_production.yaml").config
    train = config.train
    assert (train.seq_len, train.batch_size, train.accumulate_grad_batches) == (2048, 2, 2)
    assert (train.lr, train.warmup_steps, train.weight_decay) == (2e-4, 2000, 0.01)
    told = (train.steps, train.log_every, train.eval_every, train.save_every)
    assert told == (50_000, 20, 1000, 5000)
    assert (config.nsa.l, config.nsa.d, config.nsa.l_sel, config.nsa.n_sel) == (32, 16, 64, 16)
    plan = plan_launch(["--config", str(CONFIGS / "m7c_125m_2xa100_production.yaml")], {})
    assert parameter_count(plan.model_config()) == pytest.approx(78.4e6, rel=0.001)


def test_a_window_of_one_key_has_keys_that_nothing_trains() -> None:
    """Softmax over one score is 1: no loss depends on the key, so its projection stays as it is."""
    assert load_config(SMOKE, settings={"nsa.w": 2}).config.nsa.w == 2
    with pytest.raises(ConfigError, match=r"nsa\.w=1: must be at least 2 to be trained"):
        load_config(SMOKE, settings={"nsa.w": 1})


def test_the_config_of_125m_has_them() -> None:
    named = ["--config", str(CONFIGS / "m7c_125m_gpt2_2xa100.yaml")]
    plan = plan_launch(named, {})
    assert parameter_count(plan.model_config()) == pytest.approx(125e6, rel=0.005)
    other = plan_launch(["--config", str(CONFIGS / "m7c_125m_2xa100_production.yaml")], {})
    mine, theirs = plan.config.model_dump(), other.config.model_dump()
    differ = {
        f"{section}.{key}" for section in mine for key in mine[section]
        if mine[section][key] != theirs[section][key]
    }  # fmt: skip
    assert differ == {"model.mlp_ratio", "data.tokenizer", "train.out_dir"}


def test_tuned_config_is_batch_4_without_accumulation() -> None:
    train = load_config(CONFIGS / "m7c_125m_2xa100_production_tuned.yaml").config.train
    assert (train.batch_size, train.accumulate_grad_batches) == (4, 1)


def test_everything_wrong_is_in_one_message(tmp_path: Path) -> None:
    path = edited(
        tmp_path,
        ("lr: 3.0e-3", "lr: -1\n  learning_rate: 2\n  steps: 7"),
        ("n_heads: 4", "n_heads: 3"),
        ("cpu\n", "gpu\n"),
        ("use_flash: true", "use_flash: off"),
        ("seq_len: 128", 'seq_len: "128"\n  seqlen: 2048'),
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert "key 'steps' repeats line" in text
    assert "train.lr: Input should be greater than or equal to 0, got -1" in text
    assert "train.learning_rate: no such key" in text
    assert "n_heads=3 is not a multiple of n_kv_groups=2" in text
    assert "runtime.device" in text and "'gpu'" in text
    assert "runtime.use_flash: " in text and "train.seq_len: " in text
    assert "train.seqlen: no such key; did you mean seq_len?" in text
    assert "8 problem(s)" in text


@pytest.mark.parametrize("content", ["", "- 1\n", "just text\n"])
def test_a_file_without_sections_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="model, nsa, data, runtime, train"):
        load_config(path)


CONFIG = ["--config", "configs/cpu_smoke.yaml"]


def test_set_counts_as_if_the_file_said_so() -> None:
    words = ["--set", "train.steps=7", "--set", "train.lr=2e-05", "--set", "data.text_field=7"]
    plan = plan_launch([*CONFIG, *words, "--steps", "3"], {"NSA_LR": "0.5"})
    assert plan.config.train.steps == 3  # a flag wins
    assert plan.config.train.lr == 0.5  # and so does NSA_*
    assert plan.config.data.text_field == "7"
    assert plan.schedule_steps == 7
    assert plan.loaded.sources["data.text_field"] == "--set"


def test_set_is_as_strict_as_the_file() -> None:
    words = ["train.lrr=1", "nonsense", "train.lr=fast", "runtime.use_flash=1", "train.seed=1"]
    given = [word for text in [*words, "train.seed=2"] for word in ("--set", text)]
    with pytest.raises(ConfigError) as caught:
        plan_launch([*CONFIG, *given], {})
    text = str(caught.value)
    assert "5 problem(s)" in text
    for part in (
        "--set (train.lrr): no such key; did you mean lr?",
        "--set nonsense: expected SECTION.KEY=VALUE",
        "--set (train.lr): Input should be a valid number, got 'fast'",
        "--set (runtime.use_flash): Input should be a valid boolean, got 1",
        "--set train.seed: given twice",
    ):
        assert part in text


def test_nccls_watchdog_writes_its_record_of_a_hang_where_it_is_looked_for() -> None:
    prefix = f"/runs/x/{NCCL_FLIGHTS.stem}"
    dumps = torch_env.flight_dumps(prefix)
    assert dumps["TORCH_FR_DUMP_TEMP_FILE"] == prefix and int(dumps["TORCH_FR_BUFFER_SIZE"]) > 0
    assert dumps["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


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


@table(__file__, "contradictions")
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


@table(__file__, "old_spellings")
def test_origin_old_spellings_reach_the_names_that_torch_reads(
    given: str, mapped: list[str]
) -> None:
    """NCCL_ASYNC_ERROR_HANDLING and PYTORCH_CUDA_ALLOC_CONF do nothing in torch 2.13."""
    assert _mapped(given) == mapped


def test_debug_detail_never_reaches_ddp_on_gloo() -> None:
    detail = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    assert _mapped(detail, uses_nccl=False) == ["TORCH_DISTRIBUTED_DEBUG=INFO"]
    assert _mapped(detail) == [detail]


def test_both_names_of_the_allocator_are_an_error() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}
    assert "alias" in torch_env.plan(both, uses_nccl=True)[1][0]


def test_every_change_is_noted() -> None:
    for name in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "PYTORCH_CUDA_ALLOC_CONF"):
        rows, _ = torch_env.plan({name: "1"}, uses_nccl=True)
        assert rows[0].note


TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}


def plan(*argv: str, env: dict[str, str] | None = None) -> LaunchPlan:
    return plan_launch(["--config", str(SMOKE), *argv], env or {})


@table(__file__, "refused")
def test_what_is_refused_is_all_in_one_message(
    argv: str, ranks: int, env: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(NSAError) as caught:
        plan(*argv.split(), env={**(TWO if ranks == 2 else {}), **env})
    text = str(caught.value)
    assert [part for part in parts if part not in text] == []


def test_the_nodes_are_torchruns_agents_that_met() -> None:
    assert plan("--ddp", "1", env=TWO).place.nodes == 1
    assert plan("--ddp", "1", env={**TWO, "GROUP_WORLD_SIZE": "2"}).place.nodes == 2


def test_origin_no_config_is_refused() -> None:
    """The origin trained a 254,499-parameter toy instead."""
    with pytest.raises(NSAError, match="no config: give --config FILE, or CONFIG=FILE"):
        plan_launch(["--steps", "3"], {})


def test_config_comes_from_the_environment_too() -> None:
    assert plan_launch([], {"CONFIG": str(SMOKE)}).config.train.seq_len == 128


def test_a_link_to_resume_from_is_followed_when_it_is_read(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    link = tmp_path / "latest"
    link.symlink_to("old")
    found = plan("--resume", str(link))
    link.unlink()
    link.symlink_to("new")
    assert found.flags.resume == (tmp_path / "old").resolve()


def test_flags_win_over_toggles_and_toggles_over_the_config() -> None:
    both = plan("--seq-len", "64", env={"NSA_SEQ_LEN": "32", "NSA_LR": "0.5", "NSA_ACCUM": "3"})
    train = both.config.train
    assert (train.seq_len, train.lr, train.accumulate_grad_batches) == (64, 0.5, 3)
    assert both.loaded.sources["train.seq_len"] == "--seq-len"
    assert both.loaded.sources["train.lr"] == "NSA_LR"


def test_tokens_per_step_is_global() -> None:
    found = plan("--accum", "3", "--batch-size", "4", "--seq-len", "64", env=TWO)
    assert (found.tokens_per_step, found.per_rank_batch) == (4 * 3 * 64, 2)


def test_origin_sequential_is_named_where_batched_was_not_asked_for() -> None:
    assert plan().attention_path[0] == "sequential"
    assert plan(env={"NSA_PREFILL_BATCHED": "1"}).attention_path[0] == "batched"


@pytest.mark.parametrize(
    ("env", "on"), [(TWO, False), ({**TWO, "NSA_DDP_DISABLE_GC": "0"}, True), ({}, True)]
)
def test_gradient_checkpointing_is_off_under_ddp_unless_allowed(
    env: dict[str, str], on: bool, tmp_path: Path
) -> None:
    off = "gradient_checkpointing: false"
    path = edited(tmp_path, (off, off.replace("false", "true")))
    found = plan_launch(["--config", str(path)], env)
    assert found.checkpointing[0] is on
    assert found.model_config().gradient_checkpointing is on


def test_a_schedule_sets_the_steps() -> None:
    arms = schedule(("a", 5, {"NSA_DDP_BUCKET_MB": "0.5"}), ("b", 5, {}), warmup_steps=2)
    found = plan("--arms", arms, "--steps", "14")
    assert found.total_steps == 14
    assert found.blocks[0].toggles.number("NSA_DDP_BUCKET_MB") == 0.5
    assert found.blocks[1].toggles.number("NSA_DDP_BUCKET_MB") == 25
    with pytest.raises(ConfigError, match="--steps 99: the schedule of --arms has 14 steps"):
        plan("--arms", arms, "--steps", "99")
