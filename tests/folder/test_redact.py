"""No secret may reach an artifact, whatever its variable is called and wherever it is quoted."""

from __future__ import annotations

import pytest

from nsa.contract import is_secret_name
from runbook.folder.facts import (
    REDACTED,
    recorded_environment,
    redact_diff,
    redact_text,
)

CANARY = "canary-0f1e2d3c4b5a"


CODE = (
    "run_token = new_token()",
    "    tokens_per_step = seq_len * batch",
    "tokenizer: byte",
    '_SECRET_NAME = re.compile(r"x")',
    "def check(password: str | None = None) -> bool:",
    "access_token=args.access_token,",
)
SECRETS = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MYSQL_PWD",
    "PGPASSWORD", "GITHUB_PAT_TOKEN", "SSH_PRIVATE_KEY", "my_apikey", "SLACK_WEBHOOK_URL",
    "SENTRY_DSN", "NSA_SECRET", "BASIC_AUTH", "HF_AUTH",
)  # fmt: skip
OTHERS = (
    "PWD", "OLDPWD", "RUNBOOK_RUN_TOKEN", "TOKENIZERS_PARALLELISM", "NSA_DDP_BUCKET_MB",
    "NCCL_ALGO", "OMP_NUM_THREADS", "KEYBOARD", "PATH",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS + OTHERS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name) is (name in SECRETS)


@pytest.mark.parametrize(
    "environ",
    [
        # The longer of two secrets leaves nothing standing.
        {"HF_TOKEN": CANARY, "A_TOKEN": CANARY[:8]},
        {"WANDB_API_KEY": f"  {CANARY}\n"},
        {"HTTPS_PROXY": f"http://user:{CANARY}@proxy.example:8080"},
        {"PIP_INDEX_URL": f"https://{CANARY}@index.example/simple"},
        {"TLS_PRIVATE_KEY": f"first line\n{CANARY}\nlast line"},
    ],
)
def test_the_canary_dies_in_any_text(environ: dict[str, str]) -> None:
    text = f"log: got {CANARY} from the environment, and {CANARY}-suffix again"
    cleaned = redact_text(text, environ)
    assert CANARY not in cleaned
    assert cleaned.count(REDACTED) == 2


@pytest.mark.parametrize(
    "text",
    [
        "remote: https://me:hunter2@git.example/repo.git",
        "token hf_AbCdEfGhIjKlMnOpQrStUv in the log",
        "ghp_0123456789abcdefghij0123456789abcdef",
        "export AWS=AKIAIOSFODNN7EXAMPLE",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----\ncut off here",
    ],
)
def test_shapes_of_secrets_need_no_variable(text: str) -> None:
    cleaned = redact_text(text, {})
    assert REDACTED in cleaned
    for part in ("hunter2", "hf_AbCd", "ghp_01", "AKIAIOS", "b3BlbnNz", "cut off"):
        assert part not in cleaned


def test_only_what_decides_training_is_recorded() -> None:
    environ = {
        "NSA_DDP_BUCKET_MB": "50",
        "NCCL_DEBUG": "INFO",
        "NVIDIA_REQUIRE_CUDA": "cuda>=13.0 brand=unknown,driver>=535,driver<536 brand=grid",
        "HOME": "/home/someone",
        "HF_TOKEN": CANARY,
        "NCCL_AUTH_TOKEN": CANARY,
        "NCCL_X": CANARY,
        "TORCH_LOGS": f"to https://u:{CANARY}@logs.example",
        "OMP_NUM_THREADS": "1",
    }
    assert recorded_environment(environ) == {
        "NCCL_AUTH_TOKEN": REDACTED,
        "NCCL_DEBUG": "INFO",
        "NCCL_X": REDACTED,
        "NSA_DDP_BUCKET_MB": "50",
        "OMP_NUM_THREADS": "1",
        "TORCH_LOGS": f"to https://{REDACTED}@logs.example",
    }


@pytest.mark.parametrize(("value", "blanked"), [("12345", False), ("123456", True)])
def test_a_secret_has_six_characters(value: str, blanked: bool) -> None:
    """A shorter one would blank ordinary words."""
    cleaned = f"got {REDACTED if blanked else value}"
    for environ in ({"X_TOKEN": value}, {"X": f"http://me:{value}@host"}):
        assert redact_text(f"got {value}", environ) == cleaned


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ('DB_PASSWORD: "hunter22"', f"DB_PASSWORD: {REDACTED}"),
        ("AWS_TOKEN=abcd1234", f"AWS_TOKEN={REDACTED}"),
        ("AWS_TOKEN=abcd123", "AWS_TOKEN=abcd123"),
        ("token: 12345678", "token: 12345678"),
        ("API_KEY = 'abcdef123'  # mine", f"API_KEY = {REDACTED}  # mine"),
        *((code, code) for code in CODE),
    ],
)
def test_a_diff_shows_no_value_beside_the_name_of_a_secret(line: str, left: str) -> None:
    assert redact_diff(f"+{line}\n", {}) == f"+{left}\n"
