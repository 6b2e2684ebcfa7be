"""One run at a time writes into a directory; the lock of one that is dead is no obstacle."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar.run_directory import run_directory, write_whole


def _taken(path: str) -> Any:
    return run_directory(path, is_writer=True).__enter__()


def _owner(pid: int, host: str | None = None) -> str:
    return json.dumps({"host": host or socket.gethostname(), "pid": pid, "since": "2026-01-01T00:00:00+00:00"})


def _dead() -> int:
    """The number of a process that has ended."""
    return subprocess.Popen([sys.executable, "-c", ""]).wait() or int(
        subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True).stdout
    )


def test_one_process_writes_into_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name = rf"process {os.getpid()} on {socket.gethostname()}, since 20"
    with run_directory("~/runs/a", is_writer=True) as directory:
        assert (directory.path, directory.left_by) == (tmp_path / "runs" / "a", "")
        with pytest.raises(ValueError, match=rf"^run.dir='~/runs/a' is in use by another process \({name}.*\); wait"):
            _taken("~/runs/a")
        with run_directory("~/runs/a", is_writer=False):
            pass
    with run_directory("~/runs/a", is_writer=True) as directory:
        assert directory.left_by == "", "it was given back"
        with (
            pytest.raises(ValueError, match=r"^checkpoint\.directory='~/runs/a' is in use by another process \("),
            run_directory("~/runs/a", is_writer=True, key="checkpoint.directory"),
        ):
            pass


def test_the_lock_of_a_killed_run_is_taken_over_and_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(_owner(12345))
    with run_directory(str(tmp_path), is_writer=True) as directory:
        assert directory.left_by.startswith(f"process 12345 on {socket.gethostname()}, since 2026")
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_without_locks_in_the_file_system_the_owner_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with run_directory(str(tmp_path), is_writer=True):
        pass
    for owner, fix in ((_owner(1), ""), (_owner(_dead(), "elsewhere"), r", or remove .*\.lock if that run is over")):
        (tmp_path / ".lock").write_text(owner)
        with pytest.raises(ValueError, match=rf"is in use by another process \(.*\); wait .*directory{fix}$"):
            _taken(str(tmp_path))
    (tmp_path / ".lock").write_text(_owner(_dead()))
    with run_directory(str(tmp_path), is_writer=True) as directory:
        assert directory.left_by


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, reason in (("file", "there is a file of this name"), ("file/run", "Not a directory")):
        with pytest.raises(ValueError, match=rf"^run.dir='{tmp_path / name}' cannot be written: {reason}"):
            _taken(str(tmp_path / name))


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    write_whole(path, "näu")
    assert path.read_text(encoding="utf-8") == "näu"
    assert [each.name for each in tmp_path.iterdir()] == ["config.toml"]
