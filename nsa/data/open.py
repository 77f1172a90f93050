"""The source that a config asks for."""

from __future__ import annotations

from nsa.data.generated import GeneratedSource
from nsa.data.packing import PackedSource
from nsa.data.source import PrefetchSource, Source
from nsa.data.text import Corpus, FinewebCorpus, LocalCorpus
from nsa.data.tokenizers import open_tokenizer
from nsa.settings import VOCAB_SIZES, DataSection, Share


def open_source(data: DataSection, share: Share) -> Source:
    """The source of one rank. Raises DataError."""
    if data.dataset in ("synthetic", "markov"):
        return GeneratedSource(data.dataset, VOCAB_SIZES[data.tokenizer], share)
    corpus: Corpus
    of = {"rank": share.rank, "world_size": share.world_size}
    if data.dataset == "local":
        corpus = LocalCorpus(data.local_path, text_field=data.text_field, **of)
    else:
        corpus = FinewebCorpus(**of)
    packed = PackedSource(
        corpus,
        open_tokenizer(data.tokenizer, data.tokenizer_file),
        seq_len=share.seq_len,
        batch_size=share.batch_size,
    )
    return PrefetchSource(packed, timeout_s=data.loader_timeout_s)
