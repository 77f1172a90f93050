"""Which code, which packages, which checkpoint is it? By digests alone, the same on both sides."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from nsa.contract.files import CHECKSUMS_JSON, METADATA_FILE, shard_file

# With everything that they require, these are what training computes with.
_COMPUTING = ("torch", "numpy", "scipy", "pandas", "liger-kernel")
_REQUIRED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def package_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of a package's Python files, caches and the like left out.

    The trainer says it of the package that it runs, the harness of the one that it meant.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
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
