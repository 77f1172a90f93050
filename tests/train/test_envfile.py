"""What env.json must not hold."""

from __future__ import annotations

import pytest

from nsa.launch.envfile import redact


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
