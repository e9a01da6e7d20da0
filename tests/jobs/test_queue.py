"""The queue's rules: nothing is lost, nothing is run twice at once, and what has ended stays ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from jaxbench.jobs import queue
from jaxbench.jobs.queue import Queue

WORDS = ("experiments/parity.py", "--help")


def claim(held: Queue) -> str | None:
    with held.claimed("test") as entry:
        if entry is None:
            return None
        queue.end(entry, "done", exit_code=0)
        return entry.job.id


def test_a_job_waits_runs_and_ends(tmp_path):
    held = Queue(tmp_path / "new" / "queue")
    assert held.entries() == []
    id = held.submit(WORDS, title="mine", fill=lambda folder: (folder / "input").write_text("x")).job.id
    entry = held.find(id)
    assert entry.progress.state == "waiting" and (entry.folder / "input").read_text() == "x"
    with held.claimed("me") as mine:
        assert mine.job.words == WORDS and mine.job.title == "mine"
        running = held.find(id).progress
        assert (running.state, running.attempts, running.worker) == ("running", 1, "me")
        queue.end(mine, "done", exit_code=0)
    ended = held.find(id).progress
    assert ended.state == "done" and ended.started <= ended.ended and ended.exit_code == 0
    assert claim(held) is None, "what has ended is not run again"


def test_the_highest_priority_comes_first_and_then_the_oldest(tmp_path):
    held = Queue(tmp_path)
    ids = []
    for priority in (0, 5, 0, -1, 5):
        ids.append(held.submit(WORDS, priority=priority).job.id)
        time.sleep(0.002)
    assert [claim(held) for _ in ids] == [ids[i] for i in (1, 4, 0, 2, 3)]


def test_a_job_that_is_held_is_given_to_nobody_else(tmp_path):
    held = Queue(tmp_path)
    first, second = held.submit(WORDS, priority=1).job.id, held.submit(WORDS).job.id
    with held.claimed("a") as one, held.claimed("b") as two, Queue(tmp_path).claimed("c") as none:
        assert (one.job.id, two.job.id, none) == (first, second, None)


def _take_and_die(folder: str) -> None:
    with Queue(folder).claimed("dying") as entry:
        assert entry is not None
        os.kill(os.getpid(), signal.SIGKILL)


def die_holding(folder) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_take_and_die, args=(str(folder),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_worker_that_is_killed_loses_its_job_to_the_next_until_the_last_attempt(tmp_path):
    held = Queue(tmp_path)
    id = held.submit(WORDS, most_attempts=2).job.id
    die_holding(tmp_path)
    assert held.find(id).progress.state == "running", "nobody was there to write otherwise"
    with held.claimed("next") as entry:
        assert entry.job.id == id and entry.progress.attempts == 2
    with held.claimed("last") as entry:
        assert entry.progress.state == "failed", "there is nothing to run, and whoever finds it is told"
    with held.claimed("none") as entry:
        assert entry is None
    assert held.find(id).progress.state == "failed" and "2 attempts" in held.find(id).progress.note


def test_a_job_that_is_postponed_waits_its_time(tmp_path, monkeypatch):
    held = Queue(tmp_path)
    id = held.submit(WORDS).job.id
    with held.claimed("a") as entry:
        queue.postpone(entry, 60.0, attempts=1, note="it broke")
    assert claim(held) is None and held.find(id).progress.note == "it broke"
    now = time.time()
    monkeypatch.setattr(queue.time, "time", lambda: now + 61)
    assert claim(held) == id


def test_no_job_waits_longer_than_the_most_whatever_the_clock_did(tmp_path, monkeypatch):
    held = Queue(tmp_path)
    id = held.submit(WORDS, most_attempts=100).job.id
    with held.claimed("a") as entry:
        queue.postpone(entry, 5.0 * 2**40, attempts=41)
    assert claim(held) is None and held.find(id).progress.not_before <= time.time() + queue.MOST_PAUSE_S
    now = time.time()
    monkeypatch.setattr(queue.time, "time", lambda: now - 10 * 365 * 86_400)  # it had been ahead
    assert claim(held) == id


def test_a_job_that_cannot_be_taken_is_passed_over_and_named_once(tmp_path, caplog):
    held = Queue(tmp_path)
    theirs, mine = held.submit(WORDS, priority=1), held.submit(WORDS).job.id
    (theirs.folder / ".lock").mkdir()  # what is no file cannot be opened, even by root
    assert claim(held) == mine and claim(held) is None
    [said] = caplog.records
    assert said.fields["job"] == theirs.job.id and ".lock" in said.fields["error"]
    assert held.find(theirs.job.id).progress.state == "waiting"


def test_cancelling_ends_what_waits_and_marks_what_runs(tmp_path):
    held = Queue(tmp_path)
    waiting, running = held.submit(WORDS).job.id, held.submit(WORDS, priority=1).job.id
    assert held.cancel(waiting).progress.state == "cancelled"
    with held.claimed("a") as entry:
        assert entry.job.id == running
        assert held.cancel(running).progress.state == "running" and (entry.folder / "cancel").exists()
        queue.end(entry, "done")
    for id in (waiting, running):
        with pytest.raises(ValueError, match="nothing is left to cancel"):
            held.cancel(id)


def test_a_job_whose_worker_died_before_it_saw_the_cancelling_is_not_started_again(tmp_path):
    jobs = Queue(tmp_path)
    asked, other = (jobs.submit(WORDS).job.id for _ in range(2))
    with jobs.claimed("w") as entry:
        assert entry.job.id == asked and jobs.cancel(asked).progress.state == "running"
        queue.postpone(entry, 0.0, attempts=0)  # told to end, or its command broke, at that moment
    with jobs.claimed("w") as entry:
        assert entry.job.id == other
    assert jobs.find(asked).progress.state == "cancelled"
    assert jobs.retry(asked).progress.state == "waiting"


def test_only_what_failed_or_was_cancelled_is_retried_and_only_what_ended_removed(tmp_path):
    held = Queue(tmp_path)
    id = held.submit(WORDS).job.id
    for change, message in ((held.retry, "wanted one that failed"), (held.remove, "cancel it first")):
        with pytest.raises(ValueError, match=message):
            change(id)
    held.cancel(id)
    assert held.retry(id).progress == queue.Progress()
    assert claim(held) == id, "its mark of being cancelled is gone"
    with pytest.raises(ValueError, match="is done"):
        held.retry(id)
    held.remove(id)
    with pytest.raises(ValueError, match="is none of"):
        held.find(id)


def test_old_jobs_that_ended_are_removed_and_no_others(tmp_path, monkeypatch):
    held = Queue(tmp_path)
    old, waiting = held.submit(WORDS, priority=1).job.id, held.submit(WORDS).job.id
    assert claim(held) == old and held.remove_older(3600) == []
    now = time.time()
    monkeypatch.setattr(queue.time, "time", lambda: now + 3601)
    assert held.remove_older(3600) == [old] and [each.job.id for each in held.entries()] == [waiting]


@pytest.mark.parametrize(
    "id", ["", ".", "..", "../../etc", "20260101T000000-00000000000g", "20260101T000000-" + "0" * 12]
)
def test_ids_that_are_none_are_refused(tmp_path, id):
    with pytest.raises(ValueError, match="is none of"):
        Queue(tmp_path).find(id)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "is no command"),
        (["ls"], "is no command"),
        (["/bin/sh", "-c", "x"], "is no command"),
        (["../experiments/parity.py"], "is no command"),
        (["/elsewhere/parity.py"], "is no command"),
        (["experiments/none.py"], "wanted one of benchmarks.py"),
        (["watermark.pyc"], "is no command"),
        (["experiments/parity.py", "--output=caf\udce9"], r"jobs: '--output=caf\\udce9' is not UTF-8 \(place 12\)"),
    ],
)
def test_only_the_commands_of_the_repository_are_taken(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        Queue(tmp_path / "queue").submit(words)
    assert not (tmp_path / "queue").exists()


@pytest.mark.parametrize("texts", [{"cwd": "/d\udce9"}, {"title": "\udce9"}])
def test_a_folder_or_a_title_that_is_not_utf8_is_named(tmp_path, texts):
    with pytest.raises(ValueError, match=r"jobs: '.*\\udce9' is not UTF-8 \(place .\); rename"):
        Queue(tmp_path / "queue").submit(WORDS, **texts)
    assert not (tmp_path / "queue").exists()


def test_a_damaged_job_is_passed_over_and_named_where_it_is_asked_for(tmp_path):
    held = Queue(tmp_path)
    bad, good = held.submit(WORDS, priority=1), held.submit(WORDS)
    for content in ("{", json.dumps({"state": "asleep"})):
        (bad.folder / "state.json").write_text(content)
        assert [entry.job.id for entry in held.entries()] == [good.job.id]
        with pytest.raises(ValueError, match=r"state\.json|state"):
            held.find(bad.job.id)
    assert claim(held) == good.job.id


def test_files_of_a_job_that_has_ended_are_read_once_and_again_where_it_is_retried(tmp_path, monkeypatch):
    held, read = Queue(tmp_path), []
    ids = [held.submit(WORDS).job.id for _ in range(3)]
    for id in ids[:2]:
        held.cancel(id)
    (tmp_path / f"20260101T000000-{0:012d}").write_text("no folder")
    real = queue._read
    monkeypatch.setattr(queue, "_read", lambda folder: read.append(folder.name) or real(folder))
    for _ in range(3):
        assert [entry.job.id for entry in held.unfinished()] == ids[2:]
    assert sorted(read) == sorted([*ids, ids[2], ids[2]])
    Queue(tmp_path).retry(ids[0])
    assert sorted([claim(held), claim(held)]) == sorted([ids[0], ids[2]]) and held.unfinished() == []


def test_jobs_are_listed_in_the_order_of_their_submission_within_a_second_too(tmp_path):
    held = Queue(tmp_path)
    ids = [held.submit(WORDS).job.id for _ in range(12)]
    assert [entry.job.id for entry in held.entries()] == ids and held.ids() == sorted(ids)


def test_a_damaged_job_is_listed_and_removed_where_nobody_holds_it(tmp_path, monkeypatch):
    held = Queue(tmp_path)
    bad, good = held.submit(WORDS), held.submit(WORDS)
    (bad.folder / "state.json").write_text("")
    assert held.ids() == sorted([bad.job.id, good.job.id])
    with queue.holding(bad.folder), pytest.raises(ValueError, match=r"state\.json is damaged .*can be removed"):
        held.remove(bad.job.id)
    held.remove(bad.job.id)
    assert held.ids() == [good.job.id]

    def broken(path, **how):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", broken)  # such a file may be well: nothing is removed
    with pytest.raises(ValueError, match="Permission denied"):
        held.remove(good.job.id)
    assert good.folder.is_dir()


def _take_all(folder: str, taken: multiprocessing.SimpleQueue) -> None:
    while (id := claim(Queue(folder))) is not None:
        taken.put(id)


def test_several_processes_run_every_job_exactly_once(tmp_path):
    held = Queue(tmp_path)
    ids = [held.submit(WORDS).job.id for _ in range(40)]
    context = multiprocessing.get_context("spawn")
    taken = context.SimpleQueue()
    processes = [context.Process(target=_take_all, args=(str(tmp_path), taken)) for _ in range(3)]
    for each in processes:
        each.start()
    found = [taken.get() for _ in ids]
    for each in processes:
        each.join()
        assert each.exitcode == 0
    assert sorted(found) == sorted(ids) and taken.empty()
