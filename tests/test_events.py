"""`events.jsonl` says who did what when, and any change of it shows."""

import errno
import json
import os
from pathlib import Path

import pytest

from jaxpar.events import Events, read_events


def _written(path: Path, *events: str) -> list[bytes]:
    with Events(path) as opened:
        for event in events:
            opened.record(event, step=4)
    return path.read_bytes().splitlines(keepends=True)


def test_a_line_says_who_when_and_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr("sys.argv", ["train", "run.toml", "data=s3://me:hidden@host/x"])
    monkeypatch.chdir(tmp_path)
    with Events(path) as events:
        assert events.before == frozenset()
        events.record("save", step=4, directory="gs://me:hidden@bucket", changes={"a": ["x?token=hidden", 1]})
        head = events.head
    line = json.loads(path.read_text())
    assert line.keys() == {
        "time", "event", "step", "directory", "changes", "user", "host", "pid", "from", "command", "previous"
    }  # fmt: skip
    assert (line["event"], line["step"], line["from"]) == ("save", 4, str(tmp_path))
    assert "hidden" not in path.read_text()
    assert line["directory"] == "gs://***@bucket"
    with Events(path) as events:
        assert (events.before, events.head) == (frozenset({"save"}), head)
    history = read_events(path)
    assert (history.hashes, history.problems) == ((head,), ())


def test_an_event_that_a_full_disk_refuses_leaves_the_chain_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with Events(path) as events:
        events.record("start", step=0)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="no space left"):
                events.record("save", step=4)
        events.record("save", step=8)
    history = read_events(path)
    assert [(event["event"], event["step"]) for event in history.events] == [("start", 0), ("save", 8)]
    assert history.problems == ()


def test_a_changed_removed_or_added_line_shows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = _written(path, "start", "save", "saved", "end")
    assert read_events(path).problems == ()
    for broken, number in (
        ([lines[0], lines[1].replace(b'"step": 4', b'"step": 8'), *lines[2:]], 3),
        ([lines[0], *lines[2:]], 2),
        ([lines[1], lines[0], *lines[2:]], 1),
        ([*lines[:2], lines[1], *lines[2:]], 3),
    ):
        path.write_bytes(b"".join(broken))
        assert any(problem.startswith(f"line {number} does not follow") for problem in read_events(path).problems)
    path.write_bytes(b"".join([*lines[:2], b"note to self\n", *lines[2:]]))
    assert "line 3 is not an event" in read_events(path).problems
    path.write_bytes(b"".join(lines[:-1]) + b"note to self\n")
    assert read_events(path).problems == ("line 4 is not an event",)


def test_a_line_that_a_kill_cut_off_stays_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = _written(path, "start", "save")
    path.write_bytes(lines[0] + lines[1][:40])
    assert read_events(path).problems == ("line 2 is incomplete: the process that wrote it was killed, or is at it",)
    again = _written(path, "resume")
    assert again[:2] == [lines[0], lines[1][:40] + b"\n"], "nothing is taken away"
    assert [json.loads(line)["event"] for line in again[2:]] == ["incomplete line", "resume"]
    history = read_events(path)
    assert history.problems == ()
    assert [event["event"] for event in history.events] == ["start", "incomplete line", "resume"]
    # Killed between the two, the process that went on could end the line but not say so.
    path.write_bytes(lines[0] + lines[1][:40] + b"\n")
    assert [json.loads(line)["event"] for line in _written(path, "resume")[2:]] == ["incomplete line", "resume"]
    assert read_events(path).problems == ()
    # A whole line without its end is no loss.
    path.write_bytes(b"".join(again)[:-1])
    assert [json.loads(line)["event"] for line in _written(path, "end")[3:]] == ["resume", "end"]
    assert read_events(path).problems == ()


def test_without_a_path_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Events(None) as events:
        events.record("start")
    assert list(tmp_path.iterdir()) == []
    assert read_events(tmp_path / "none.jsonl").events == ()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/events.jsonl cannot be written: Not a directory"):
        Events(tmp_path / "file" / "events.jsonl")
