"""Copies of runs by rsync: what names a host, what goes there and comes back, what is said where it fails."""

import shutil
from types import SimpleNamespace

import pytest

from jaxbench import cli
from jaxbench.regress import history, history_commands, remote_copy
from tests.regress.records import quiet, record

WITH_RSYNC = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@pytest.fixture
def kept(tmp_path):
    found = history.History(tmp_path / "h")
    for day in (1, 2, 3):
        found.add(record(quiet(), time_utc=f"2026-11-0{day}T12:00:00+00:00"))
    found.list()  # the index, which is not copied
    return found


@pytest.mark.parametrize("target", ["me@host:folder", "host:/a/b", "a.example.org:x/y"])
def test_a_host_before_a_colon_is_one(target):
    assert remote_copy.is_remote(target)


@pytest.mark.parametrize("target", ["folder", "./a:b", "/a/b:c", "../x"])
def test_a_folder_is_none(target):
    assert not remote_copy.is_remote(target)


@pytest.mark.parametrize("target", ["host::module", "-e:x", "host:", "rsync://host/x", "host:a b", "me@-oProxy:x"])
def test_what_rsync_would_read_otherwise_is_refused(target):
    with pytest.raises(ValueError, match=r"wanted a folder, or \[USER@\]HOST:FOLDER"):
        remote_copy.is_remote(target)


def test_a_machine_without_rsync_says_so_in_one_line(kept, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for call in (lambda: remote_copy.send(kept.folder, "h:x"), lambda: remote_copy.fetch("h:x", kept.folder)):
        with pytest.raises(ValueError, match="--backup=h:x names a host, and rsync is not installed here"):
            call()


@WITH_RSYNC
def test_runs_go_to_another_folder_once_and_come_back(kept, tmp_path):
    target = tmp_path / "copy"
    assert remote_copy.send(kept.folder, str(target)) == 3 and remote_copy.send(kept.folder, str(target)) == 0
    assert {path.suffix for path in target.rglob("*") if path.is_file()} == {".json"}
    kept.tag(kept.list()[0].id, "v1")
    assert remote_copy.send(kept.folder, str(target)) == 1
    assert len(list(target.rglob("*.json.before"))) == 1  # the run as it was untagged
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    assert remote_copy.fetch(str(target), fetched) == 3
    kept.files()[0].unlink()
    assert kept.restore(fetched).count == 1 and kept.load("v1")["tag"] == "v1"


@WITH_RSYNC
def test_a_history_without_runs_copies_none_and_a_failure_names_what_rsync_said(kept, tmp_path):
    assert remote_copy.send(tmp_path / "none", str(tmp_path / "copy")) == 0
    (tmp_path / "file").touch()
    with pytest.raises(remote_copy.CopyFailed, match="rsync ended with"):
        remote_copy.send(kept.folder, str(tmp_path / "file"))


@WITH_RSYNC
def test_a_damaged_run_is_left_out_and_alerts_and_qualifications_go_too(kept, tmp_path):
    target, first = tmp_path / "copy", kept.files()[0]
    (kept.folder / "alerts.jsonl").write_text("{}\n")
    kept.qualify({"about": {"machine": {"host": "h"}, "device": "cpu", "suite": "quick"}})
    assert remote_copy.send(kept.folder, str(target)) == 5
    whole = first.read_bytes()
    first.write_bytes(whole[:30])
    assert remote_copy.send(kept.folder, str(target), left_out=kept.damaged()) == 0
    assert (target / first.relative_to(kept.folder)).read_bytes() == whole
    assert {"alerts.jsonl", "h-cpu-quick.json"} <= {path.name for path in target.rglob("*")}


def test_a_copy_that_fails_ends_the_command_with_1_and_a_folder_is_copied_to_without_rsync(
    kept, tmp_path, monkeypatch, capsys
):
    def failing(folder, target, *, left_out):
        raise remote_copy.CopyFailed(f"--backup={target}: rsync ended with 255 (no route)")

    def flags(target):
        given = {"history": str(kept.folder), "backup": target}
        monkeypatch.setattr(history_commands, "VALUES", SimpleNamespace(**given))

    monkeypatch.setattr(remote_copy, "send", failing)
    flags("host:folder")
    with pytest.raises(cli.GateFailed, match="--backup=host:folder: rsync ended with 255"):
        history_commands.backup()
    flags(str(tmp_path / "copy"))
    assert history_commands.backup() == cli.EXIT_OK and "3 files copied" in capsys.readouterr().out
