"""Strict configs: YAML's traps, wrong keys and values, shapes that do not fit, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.config import parameter_count
from nsa.launch.plan import plan_launch
from nsa.settings import ConfigError, load_config
from nsa.strict_yaml import load_strict

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMOKE = CONFIGS / "cpu_smoke.yaml"


def test_yaml_traps() -> None:
    data, problems = load_strict("a: off\nb: 1e-4\nc: 010\nd: yes\ne: true\nf: 1_000\na: 2\n")
    assert data == {"a": 2, "b": 1e-4, "c": "010", "d": "yes", "e": True, "f": 1000}
    assert problems == ["line 7: key 'a' repeats line 1"]


@pytest.mark.parametrize(
    "value",
    ["!!binary aGk=", "!!set {a, b}", "!!timestamp 2001-01-01", "!!int x", "!!float x", "!!bool x",
     "!!null x", "!!omap [a: 1]", "!!seq 5", "!own 5", "!!python/object:os.system x"],
)  # fmt: skip
def test_a_tag_is_refused_where_it_stands(value: str) -> None:
    said = f"not valid YAML: line 2: the tag {value.split()[0]} is not read; write the value alone"
    assert load_strict(f"a: 1\nb: {value}\n") == (None, [said])
    assert load_strict("a: !!int 5\nb: !!str 5\n") == ({"a": 5, "b": "5"}, [])


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
    text = SMOKE.read_text()
    for old, new in (
        ("lr: 3.0e-3", "lr: -1\n  learning_rate: 2\n  steps: 7"),
        ("n_heads: 4", "n_heads: 3"),
        ("cpu\n", "gpu\n"),
        ("use_flash: true", "use_flash: off"),
        ("seq_len: 128", 'seq_len: "128"\n  seqlen: 2048'),
    ):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "config.yaml"
    path.write_text(text)
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
