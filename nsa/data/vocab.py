"""Vocabulary sizes of the tokenizers. Torch-free."""

from __future__ import annotations

# GPT-2's 50,257 tokens, padded to a multiple of 128 for the GPU's matrix units.
VOCAB_SIZES = {"byte": 256, "gpt2": 50_304}
