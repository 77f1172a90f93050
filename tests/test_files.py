"""Files are written whole, folders are private."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runbook.files import make_private_dir, not_read, read_given, typed_here, write_atomic


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(OSError):
        write_atomic(tmp_path / "missing" / "x", "text")


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        make_private_dir(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700] * 2
    with pytest.raises(FileExistsError):
        make_private_dir(tmp_path / "a" / "b")


def test_another_node_may_make_the_same_parents_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def second(self: Path, mode: int = 0o777) -> None:
        if self == tmp_path / "a":
            mkdir(self, mode)  # by the other one, just before
        mkdir(self, mode)

    monkeypatch.setattr(Path, "mkdir", second)
    make_private_dir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        make_private_dir(tmp_path / "file" / "b")


def test_a_named_file_is_read_and_what_has_no_end_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(pipe := tmp_path / "pipe")
    assert read_given(tmp_path / "file") == b"x"
    for path, words in ((pipe, "save it as a file"), (Path("/dev/zero"), "save it as a file")):
        with pytest.raises(OSError, match=words):
            read_given(path)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError):
            read_given(path)


def test_a_pipe_is_read_to_its_end_if_somebody_writes(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match=r"nobody has written into this pipe for 0.01 s"):
        read_given(pipe, pipe=True, wait_s=0.01)
    text = b"a row\n" * 100_000
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()
    assert read_given(pipe, pipe=True, wait_s=60) == text
    writer.join()


def test_a_pipe_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    handle = os.open(path, os.O_RDWR)
    with subprocess.Popen(["cat", "/dev/zero"], stdout=handle) as zeros:
        os.close(handle)
        try:
            with pytest.raises(OSError, match="has 1001 bytes, at most 1000 are read"):
                read_given(path, pipe=True, most=1000)
        finally:
            zeros.kill()


@pytest.mark.parametrize(
    ("started", "path", "typed"),
    [
        ("bin/runbook", "", "bin/runbook"),
        ("./runbook", "", "./runbook"),
        ("bin/runbook", "bin", "runbook"),
        ("bin/other.py", "", "runbook"),
        ("gone/runbook", "", "runbook"),
    ],
)
def test_where_the_program_is_not_on_the_path_its_own_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, path: str, typed: str
) -> None:
    for name in ("bin/runbook", "runbook", "bin/other.py"):
        script = tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    monkeypatch.setattr(sys, "argv", [started])
    assert typed_here() == typed


def test_who_may_not_read_what_is_told_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder is its owner's; whose it is and its mode are those of the system."""
    kept = tmp_path / "it is mine"
    kept.mkdir(mode=0o700)
    refused = PermissionError(13, "Permission denied", str(kept / "a" / "run.json"))
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != kept or mode == os.F_OK)
    me = pwd.getpwuid(os.geteuid()).pw_name
    begins = f"may not be read by {me}: {kept} belongs to {me}, mode 0700: "
    assert not_read(refused) == f"{begins}`chmod -R u+rX '{kept}'`"
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    told = not_read(refused)
    assert told.startswith(f"may not be read by user 4000000000: {kept} belongs to {me}, ")
    assert told.endswith(f"ask {me} for `chmod -R a+rX '{kept}'`, or do this as {me}")


def test_what_was_refused_for_another_reason_keeps_the_words_of_the_system(tmp_path: Path) -> None:
    assert not_read(PermissionError(13, "Permission denied", str(tmp_path / "new"))) == (
        "Permission denied"
    )
    # A link that only the kernel may follow: what it leads to cannot even be looked at.
    link = "/proc/1/cwd"
    assert not_read(PermissionError(13, "Permission denied", link)) == "Permission denied"
    assert not_read(FileNotFoundError(2, "No such file", str(tmp_path))) == "No such file"
    assert not_read(OSError(5, "Input/output error")) == "Input/output error"
