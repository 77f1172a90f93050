"""The source that a config asks for."""

from __future__ import annotations

from nsa.data.generated import GeneratedSource
from nsa.data.packing import PackedSource
from nsa.data.source import PrefetchSource, Source
from nsa.data.text import Corpus, FinewebCorpus, LocalCorpus
from nsa.data.tokenizers import open_tokenizer
from nsa.settings import VOCAB_SIZES, DataSection


def open_source(
    data: DataSection,
    *,
    dataset: str,
    seq_len: int,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
) -> Source:
    """The source of one rank; batch_size is the rank's. Raises DataError."""
    if dataset in ("synthetic", "markov"):
        return GeneratedSource(
            dataset,
            vocab_size=VOCAB_SIZES[data.tokenizer],
            seq_len=seq_len,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
        )
    corpus: Corpus
    if dataset == "local":
        corpus = LocalCorpus(
            data.local_path, text_field=data.text_field, rank=rank, world_size=world_size
        )
    else:
        corpus = FinewebCorpus(rank=rank, world_size=world_size)
    packed = PackedSource(
        corpus,
        open_tokenizer(data.tokenizer, data.tokenizer_file),
        seq_len=seq_len,
        batch_size=batch_size,
    )
    timeout_s = data.loader_timeout_s
    return PrefetchSource(packed, first_timeout_s=timeout_s, steady_timeout_s=timeout_s)
