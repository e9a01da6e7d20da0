"""Finished work: parts are made once, rows survive whatever cuts a write short, and work of another run is refused."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys

import pytest

from jaxbench import cli, store

ROWS = [{"row": 0, "text": "first"}, {"row": 1, "text": "second é"}]


def test_a_part_is_made_once_and_then_read(tmp_path):
    path, made = tmp_path / "parts" / "one.json", []

    def compute():
        made.append(1)
        return {"values": (1, 2)}

    assert store.kept(path, compute) == ({"values": [1, 2]}, False), "what the file holds, not what was computed"
    assert store.kept(path, compute) == ({"values": [1, 2]}, True)
    assert made == [1]


def test_a_part_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        store.kept(tmp_path / "one.json", lambda: 1 / 0)
    assert list(tmp_path.iterdir()) == []


def test_rows_come_back_whole_and_what_was_cut_short_is_written_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert store.rows(path) == []
    store.append(path, ROWS)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"row": 2, "te')
    assert [json.loads(line) for line in store.rows(path)] == ROWS
    store.append(path, ROWS[:1])
    assert [json.loads(line) for line in store.rows(path)] == [*ROWS, ROWS[0]]
    path.write_text('{"row"')
    store.cut_short(path)
    assert path.read_bytes() == b"" == b"".join(store.rows(path))


def test_numbers_that_are_not_finite_are_null(tmp_path):
    store.append(tmp_path / "rows", [{"a": float("nan"), "b": float("inf"), "c": 1.5}])
    assert json.loads(store.rows(tmp_path / "rows")[0]) == {"a": None, "b": None, "c": 1.5}


def test_a_full_disk_leaves_the_rows_that_were_there(tmp_path):
    path = tmp_path / "rows"
    store.append(path, ROWS)
    before = path.read_bytes()
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, kept[1]))
    try:
        with pytest.raises(OSError, match="No space left on device after 10 of") as caught:
            store.append(path, ROWS)
        assert cli.explain(caught.value).startswith(f"cannot write {path}: No space left on device after 10 of ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert path.read_bytes() == before


def test_the_work_of_another_configuration_is_refused(tmp_path):
    store.claim(tmp_path / "work", "one")
    store.claim(tmp_path / "work", "one")
    with pytest.raises(ValueError, match="work of configuration one, this is two; use another --workdir"):
        store.claim(tmp_path / "work", "two")


HOLDS = """
import sys, time
from pathlib import Path
from jaxbench import store

with store.alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_process_at_a_time_writes_an_output_and_one_that_was_killed_lets_go(tmp_path):
    path = tmp_path / "out.jsonl"
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"another process writes .*out\.jsonl; wait for its end, or name another"):
            with store.alone(tmp_path / "other.jsonl", path):
                pytest.fail("nobody else was alone")
        assert [each.name for each in tmp_path.iterdir()] == [".out.jsonl.writing"], "its own locks are gone"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    with store.alone(path):
        assert [each.name for each in tmp_path.iterdir()] == [".out.jsonl.writing"]
    assert list(tmp_path.iterdir()) == []


def test_who_writes_alone_leaves_only_folders_with_something_in_them(tmp_path):
    with store.alone(tmp_path / "new" / "folder" / "out.jsonl"):
        pass
    assert list(tmp_path.iterdir()) == []
    with store.alone(tmp_path / "new" / "folder" / "out.jsonl"):
        (tmp_path / "new" / "folder" / "out.jsonl").touch()
    assert [each.name for each in (tmp_path / "new" / "folder").iterdir()] == ["out.jsonl"]


def test_a_lock_that_was_removed_meanwhile_holds_nothing(tmp_path, monkeypatch):
    import fcntl

    path = tmp_path / "lock"
    monkeypatch.setattr(fcntl, "flock", lambda file, how: path.unlink())
    with store.taken(path) as is_mine:
        assert not is_mine
