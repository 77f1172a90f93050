"""Is a checkpoint whole, and which one is it? By its digests alone. Torch-free."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from nsa.contract import CHECKSUMS_JSON, METADATA_FILE, shard_file


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
