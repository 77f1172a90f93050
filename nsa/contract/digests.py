"""Which code, which packages, which checkpoint is it, and what does a launch's token draw?

By digests alone, the same on both sides: nobody knows drawn steps and batches before there is a
token. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from nsa.contract import CHECKSUMS_JSON, METADATA_FILE, shard_file

# With everything that they require, these are what training computes with.
_COMPUTING = ("torch", "numpy", "scipy", "pandas")
# What of a package decides its numbers: code, and tables that it reads.
_PYTHON = ".py"
_DECIDING = (_PYTHON, ".yaml")
_REQUIRED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Looking(SourceFileLoader):
    """Python's own way to the code of a module, without a cache written for it."""

    def set_data(self, path: str, data: object, **_: object) -> None:
        pass


def other_code(path: Path) -> bytes:
    """The code that Python runs for this module, where its cache is of another source; else b"".

    A cache is taken for the source's by time and size, or unseen. Raises OSError.
    """
    cache = Path(cache_from_source(str(path)))
    if not cache.is_file():
        return b""
    return _other_code(path, path.read_bytes(), path.stat().st_mtime_ns, cache.read_bytes())


@lru_cache(maxsize=2048)
def _other_code(path: Path, source: bytes, _of: int, _cache: bytes) -> bytes:
    """Asked once for each source of a time and each cache: compiling a package takes a while."""
    loader = _Looking("", str(path))
    try:
        meant, runs = loader.source_to_code(source, str(path)), loader.get_code("")
    except (ImportError, SyntaxError, ValueError, EOFError, TypeError):
        return b""  # whoever imports it is told
    return b"" if runs == meant else marshal.dumps(runs)


def package_digest(folder: Path) -> str:
    """SHA-256 over names and bytes of a package's Python and YAML, and of other code run for it.

    Caches that are of their sources, and all other files, are left out. The trainer says it of the
    package that it runs, the harness of the one that it meant.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _DECIDING):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content + (other_code(path) if path.suffix == _PYTHON else b""))
    return digest.hexdigest()


def installed_digest() -> str:
    """SHA-256 over names and versions of the packages that training computes with.

    The harness says it of a run, the trainer of a launch. Others, such as a profiler that was
    installed to look into a hang, change no number and are left out.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    found: dict[str, str] = {}
    seen: set[str] = set()
    left = list(_COMPUTING)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = package.version
        needed = (one for one in package.requires or () if "extra ==" not in one)
        left += [match[0] for one in needed if (match := _REQUIRED.match(one))]
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The digest of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def identity_of(folder: Path) -> str:
    """The digest of a checkpoint's list of digests: no other checkpoint has it. Raises OSError."""
    return sha256_of(folder / CHECKSUMS_JSON)


def damage(folder: Path, rank: int = 0) -> str | None:
    """What is wrong with a checkpoint, by its digests; None when it is sound."""
    try:
        listed: dict[str, str] = json.loads((folder / CHECKSUMS_JSON).read_bytes())["sha256"]
        needed = {METADATA_FILE, shard_file(rank)}
        if not needed <= set(listed):
            return f"holds no {', '.join(sorted(needed - set(listed)))}"
        for name, digest in listed.items():
            if sha256_of(folder / name) != digest:
                return f"{name} differs from its sha256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable ({type(error).__name__}: {error})"
    return None


# Pairs of steps, beside the first and the last one, in which the optimizer is watched: so many,
# and in a long launch one for so many steps, up to what is kept in memory until the end.
_FEWEST_PAIRS, _STEPS_A_PAIR, _MOST_PAIRS = 3, 240, 25
# A short launch has one pair for so many steps whose gradient is computed a second time.
_SHORT_STEPS_A_PAIR = 10


def _drawn_pairs(steps: int) -> int:
    """In how many pairs of its steps a launch is looked at: of a long one, 1 step in 120."""
    return min(_MOST_PAIRS, max(_FEWEST_PAIRS, steps // _STEPS_A_PAIR))


def _drawn_step(token: str, number: int, first: int, last: int) -> int:
    """A step that nobody knows before there is a token, and never the last of several."""
    return first + _below(last - first, f"{number} {token}")


def watched_steps(token: str, first: int, last: int) -> tuple[int, ...]:
    """The steps in which a launch from step `first` to `last` watches its optimizer, ascending.

    The first two, the last two, and pairs between that nobody knows before there is a token.
    """
    begins, pairs = {first, max(first, last - 1)}, _drawn_pairs(last - first + 1)
    begins |= {_drawn_step(token, number, first, last) for number in range(pairs)}
    return tuple(sorted({step for begin in begins for step in (begin, begin + 1) if step <= last}))


def recomputed_steps(
    token: str, first: int, last: int, *, profiled: bool = False
) -> tuple[int, ...]:
    """Of the watched steps those whose loss and gradient are computed a second time, ascending.

    The first, and of a launch of some length drawn pairs: time that counts for no step has to stay
    rare. `profiled`: a trace shows steps as they are, so it is the first alone.
    """
    steps = last - first + 1
    pairs = 0 if profiled else min(_drawn_pairs(steps), steps // _SHORT_STEPS_A_PAIR)
    begins = [_drawn_step(token, number, first, last) for number in range(pairs)]
    return tuple(sorted({first, *(step for begin in begins for step in (begin, begin + 1))}))


def step_weight(step: Any) -> Any:
    """By what a step, or each of a column, counts in the sums that the exit event tells: neighbors
    count otherwise.
    """
    return 1 + step % 3


def drawn_batch(token: str, rank: int, step: int, batches: int) -> int:
    """Which of a rank's held-out batches, from 0, its evaluation after a step computes again."""
    return _below(batches, f"eval {rank} {step} {token}")


def _below(count: int, words: str) -> int:
    """A number from 0 to count - 1 that follows from the words; 0 where there is none."""
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % max(1, count)
