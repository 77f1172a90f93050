"""Every line of the five documents is typed or checked, and does what the table says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsa.settings import load_config
from nsa.toggles import TOGGLES, meaning
from nsa.torch_env import plan
from phases.kit.playbook import playbook
from runbook.cli import main
from runbook.config import Profile
from runbook.config.load import load_profile
from runbook.config.plan import load_plan, with_plan
from runbook.config.registry import known_checks
from runbook.tools.triage_steps import STEPS
from tests.cli.shell import inside
from tests.docs.desk import Typed, typed
from tests.docs.test_spec import REQUIREMENTS, ROOT, TEXT

TABLE = yaml.safe_load((Path(__file__).parent / "documents.yaml").read_text(encoding="utf-8"))
BLOCKS: Mapping[str, Mapping[str, Any]] = TABLE["blocks"]
LINES: list[dict[str, Any]] = [
    {"document": name, **one} for name, lines in TABLE["lines"].items() for one in lines
]
PROOFS = (
    *("typed", "set", "refused", "becomes", "limit", "decides", "shown", "step", "remedy"),
    *("config", "default", "replay", "spec"),
)
PROFILE = "a100x2_pcie4"


def proven_by(kind: str) -> list[Any]:
    """The lines with this proof, each named by its document and place."""
    return [
        pytest.param(one, id=f"{one['document']} {one['at']} {one['line']}"[:60])
        for one in LINES
        if kind in one
    ]


def missed(result: Typed, block: Mapping[str, Any]) -> list[str]:
    """What the block was to give, and did not."""
    found = [f"exit code {result.code}"] if result.code != block.get("code", 0) else []
    found += [say for say in block.get("says", ()) if not re.search(say, result.out, re.MULTILINE)]
    latest = result.desk / "artifacts/m7c_125m_2xa100_prod/latest"
    return found + [name for name in block.get("lacks", ()) if (latest / name).exists()]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", BLOCKS)
def test_a_typed_block_keeps_its_promise(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    result = typed(tmp_path_factory, name, BLOCKS)
    assert not missed(result, BLOCKS[name]), result.out
    for line in LINES:
        if line.get("typed") == name and "leaves" in line:
            assert (result.desk / line["leaves"]).is_file(), line


def with_shell(settings: str, *words: str) -> Any:
    """`runbook run --dry-run` of all phases on two A100s, in a shell with these variables."""
    variables = dict(word.split("=", 1) for word in settings.split())
    words = ("run", "--dry-run", "--profile", PROFILE, "--phase", "all", *words)
    return inside(*words, cwd=ROOT, **variables)


def values_in(launch: Mapping[str, Any], name: str) -> set[str]:
    """The values of a variable in a launch, which may be a comparison of several."""
    arms = (launch["schedule"] or {"settings": {}})["settings"].values()
    own = {arm[name] for arm in arms if name in arm}
    return own | ({launch["env"][name]} if name in launch["env"] else set())


@pytest.mark.parametrize("settings", sorted({one["set"] for one in LINES if "set" in one}))
def test_a_variable_of_the_shell_reaches_every_trainer(settings: str) -> None:
    ended = with_shell(settings, "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    launches = [one for phase in document["phases"] for one in phase["launches"]]
    for word in settings.split():
        name, value = word.split("=", 1)
        assert document["settings"][name] == value and document["sources"][name] == "shell"
        # One process has no use for settings of DDP and NCCL.
        of_ranks = name.startswith(("NSA_DDP_", "NCCL_"))
        trained = [
            one
            for one in launches
            if one["kind"] == "trainer" and not (of_ranks and one["argv"][0] == "python")
        ]
        assert len({one["phase"] for one in trained}) >= 5
        for one in trained:
            assert meaning(name, {name: value}) in {
                meaning(name, {name: own}) for own in values_in(one, name)
            }, one["phase"]


@pytest.mark.parametrize("line", proven_by("refused"))
def test_a_variable_that_cannot_be_had_is_refused_with_what_to_do(line: dict[str, Any]) -> None:
    ended = with_shell(line["refused"])
    assert ended.code == 2 and line["instead"] in ended.err, ended.err


@pytest.mark.parametrize("line", proven_by("becomes"))
def test_an_old_variable_is_translated_with_its_reason(line: dict[str, Any]) -> None:
    name, _, value = line["becomes"].partition("=")
    rows, problems = plan({name: value}, uses_nccl=True)
    assert not problems and [row.note for row in rows] == [line["instead"]]


@pytest.mark.parametrize("line", [*proven_by("limit"), *proven_by("default")])
def test_a_limit_and_a_default_are_those_of_the_document(line: dict[str, Any]) -> None:
    limits = load_profile(line.get("of", PROFILE)).limits
    found = limits[line["limit"]].value if "limit" in line else TOGGLES[line["default"]].default
    assert found == line["is"]


def profile_of(line: Mapping[str, Any]) -> Profile:
    """What a GO needs of `runbook run`, or of `runbook launch`, on two A100s."""
    profile = load_profile(PROFILE)
    launch = line.get("of") == "launch"
    return with_plan(profile, load_plan("production"), shipped=True) if launch else profile


@pytest.mark.parametrize("line", [*proven_by("decides"), *proven_by("shown")])
def test_a_demand_is_a_check_that_a_go_needs_or_that_is_shown(line: dict[str, Any]) -> None:
    profile = profile_of(line)
    check = line.get("decides") or line["shown"]
    assert check in known_checks(profile)
    assert (check in profile.required) is ("decides" in line)


@pytest.mark.parametrize("line", proven_by("step"))
def test_a_step_of_triage_does_what_the_document_does(line: dict[str, Any]) -> None:
    steps = {one.name: one for steps in STEPS.values() for one in steps}
    assert line["does"] in settings_of(steps[line["step"]].model_dump())


def settings_of(step: Mapping[str, Any]) -> str:
    """What the step changes, in words: its title, and NAME=VALUE of everything that it sets."""

    def words(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield from (f"{name}={one}" for name, one in value.items())
        elif isinstance(value, list | tuple):
            yield from map(str, value)
        else:
            yield str(value)

    return " ".join(word for value in step.values() for word in words(value))


@pytest.mark.parametrize("line", proven_by("remedy"))
def test_advice_of_the_document_is_in_the_playbook(line: dict[str, Any]) -> None:
    assert line["says"] in str(playbook().by_topic[line["remedy"]])


@pytest.mark.parametrize("line", proven_by("config"))
def test_a_config_has_what_the_document_says(line: dict[str, Any]) -> None:
    config = load_config(ROOT / "configs" / line["config"]).config.model_dump()
    for key, value in line["has"].items():
        section, _, name = key.partition(".")
        assert config[section][name] == value, key


@pytest.mark.parametrize("line", proven_by("replay"))
def test_what_a_report_claims_is_judged_by_its_own_numbers(
    line: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", line["replay"]]) in (1, 3)
    assert line["says"] in capsys.readouterr().out


@pytest.mark.parametrize("line", proven_by("spec"))
def test_what_is_contradicted_is_explained_in_the_specification(line: dict[str, Any]) -> None:
    status = REQUIREMENTS[line["req"]][5]
    assert status.startswith("contradicted: ") and len(status) > len("contradicted: ") + 20


def becomes_of(line: Mapping[str, Any]) -> str:
    """What becomes of a line here, in the words of the page's columns."""
    code = BLOCKS.get(line.get("typed", ""), {}).get("code", 0)
    if "differs" in line:
        return "differs"
    if "refused" in line or code in (1, 2):
        return "refused with words"
    return "works otherwise" if "instead" in line else "works as typed"


def test_every_line_has_one_proof_and_says_what_to_type_where_it_does_not_work() -> None:
    for line in LINES:
        (proof,) = [kind for kind in PROOFS if kind in line]
        assert line["req"] in REQUIREMENTS, line
        assert not ("instead" in line and "differs" in line), line
        if proof in ("refused", "becomes"):
            assert line["instead"], line
        if proof == "spec":
            assert line["differs"], line
        if becomes_of(line) == "refused with words" and proof == "typed":
            says = " ".join(BLOCKS[line["typed"]]["says"])
            assert "instead" in line or "first: runbook run" in says, line
    unused = set(BLOCKS) - {line.get("typed") for line in LINES}
    assert not unused, "a block that no line needs"


def test_every_requirement_of_a_document_has_a_line_and_the_page_has_the_counts() -> None:
    shown = re.findall(r"^\| (\w[\w ]*) \| (\d+(?: \| \d+){4}) \|$", TEXT, re.MULTILINE)
    named = {line["req"] for line in LINES}
    assert sorted(set(REQUIREMENTS) - named) == []
    columns = ("works as typed", "works otherwise", "refused with words", "differs")
    assert f"| document | lines | {' | '.join(columns)} |" in TEXT
    for name, lines in {**TABLE["lines"], "all": LINES}.items():
        found = [becomes_of(line) for line in lines]
        counted = " | ".join(map(str, (len(lines), *map(found.count, columns))))
        assert dict(shown)[name] == counted, name
