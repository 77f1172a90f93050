"""No secret may reach an artifact, whatever its variable is called and wherever it is quoted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nsa.contract import is_secret_name
from runbook.folder.facts import REDACTED, recorded_environment, redact_diff, redact_text

CANARY = "canary-0f1e2d3c4b5a"
KNOWN = yaml.safe_load(Path(__file__).with_name("secrets.yaml").read_text("utf-8"))
SECRETS, OTHERS = KNOWN["names"].split(), KNOWN["other_names"].split()


@pytest.mark.parametrize("name", SECRETS + OTHERS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name) is (name in SECRETS)


@pytest.mark.parametrize("environ", KNOWN["environments"])
def test_the_canary_dies_in_any_text(environ: dict[str, str]) -> None:
    text = f"log: got {CANARY} from the environment, and {CANARY}-suffix again"
    cleaned = redact_text(text, environ)
    assert CANARY not in cleaned and cleaned.count(REDACTED) == 2


@pytest.mark.parametrize(("text", "part"), KNOWN["shapes"])
def test_shapes_of_secrets_need_no_variable(text: str, part: str) -> None:
    cleaned = redact_text(text, {})
    assert REDACTED in cleaned and part in text and part not in cleaned


def test_only_what_decides_training_is_recorded() -> None:
    environ = {name: value for name, value, _ in KNOWN["recorded"]}
    kept = {name: left for name, _, left in KNOWN["recorded"] if left is not None}
    assert recorded_environment(environ) == kept


@pytest.mark.parametrize(("value", "blanked"), [("12345", False), ("123456", True)])
def test_a_secret_has_six_characters(value: str, blanked: bool) -> None:
    """A shorter one would blank ordinary words."""
    cleaned = f"got {REDACTED if blanked else value}"
    for environ in ({"X_TOKEN": value}, {"X": f"http://me:{value}@host"}):
        assert redact_text(f"got {value}", environ) == cleaned


@pytest.mark.parametrize("case", KNOWN["diff"])
def test_a_diff_shows_no_value_beside_the_name_of_a_secret(case: list[str]) -> None:
    assert redact_diff(f"+{case[0]}\n", {}) == f"+{case[-1]}\n"
