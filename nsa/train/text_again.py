"""The text that the first batch of documents stands for, beside what was read of the files.

What a tokenizer makes of a document is held against the document as it came: bytes are their own
table, and GPT-2's tokens are turned back by tiktoken. A tokenizer that changes text before it
encodes it agrees with itself in everything else.
"""

from __future__ import annotations

import hashlib
from typing import Any

from nsa.data.source import Batch
from nsa.data.tokenizers import Gpt2Tokenizer
from nsa.settings import DataSection

_BETWEEN = {"byte": b"\0", "gpt2": b"<|endoftext|>"}


def text_again(batch: Batch, data: DataSection) -> dict[str, Any] | None:
    """The `text` of the proof: digests of the batch's text as read and as its tokens tell it.

    documents, bytes: of how many; apart: the first byte in which they differ, or None. None where
    the batch is not the first one of documents that are read from their beginning.
    """
    if not batch.texts:
        return None
    rows = batch.tokens.tolist()
    # Windows overlap by one token.
    tokens = [*rows[0], *(token for row in rows[1:] for token in row[1:])]
    between = _BETWEEN[data.tokenizer]
    if data.tokenizer == "byte":
        decoded = bytes(tokens)
        texts = [text.encode("utf-8", "replace").replace(b"\0", b"") for text in batch.texts]
    else:
        decoded = Gpt2Tokenizer(data.tokenizer_file).decode(tokens)
        # Half a surrogate pair is a replacement character to tiktoken.
        texts = [
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            for text in batch.texts
        ]
    read = (between + between.join(texts) + between)[: len(decoded)]
    pairs = enumerate(zip(read, decoded, strict=False))
    return {
        "documents": len(texts),
        "bytes": len(decoded),
        "read": hashlib.sha256(read).hexdigest(),
        "decoded": hashlib.sha256(decoded).hexdigest(),
        "apart": next((n for n, (one, other) in pairs if one != other), None),
    }
