"""Faults: a full disk, a clock that was set back, two writers at once, a kill: nothing is lost, one line says what."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxbench.measure.environment import ROOT
from jaxbench.regress import run
from jaxbench.regress.alert_config import Alerts
from jaxbench.regress.alerts import Book
from jaxbench.regress.history import INDEX, History
from jaxbench.regress.suite import Suite
from tests.regress.test_alerts import NOON, Post, hours
from tests.regress.test_alerts import record as finding
from tests.regress.test_history import record
from tests.regress.test_imported import PYTEST

# Starts a command that may not write files beyond a size, as on a full disk.
LIMITED = """
import resource, signal, subprocess, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(subprocess.call([sys.executable, "experiments/benchmarks.py", *sys.argv[2:]]))
"""
# Adds runs, one after another, and says so.
ADDING = """
import sys
from pathlib import Path
from jaxbench.regress.history import History
from tests.regress.test_history import record
history = History(Path(sys.argv[1]))
for index in range(int(sys.argv[3])):
    history.add(record(int(sys.argv[2]) + index, median=1.0 + index))
    print(len(history.list()), flush=True)
"""


def adding(folder, first, count):
    command = [sys.executable, "-c", ADDING, str(folder), str(first), str(count)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limits on the size of files here")
def test_a_full_disk_is_said_in_one_line_and_the_history_stays(tmp_path):
    history = History(tmp_path / "history")
    history.add(record(1))
    before = {path: path.read_bytes() for path in history.files()}
    (tmp_path / "b.json").write_text(json.dumps(PYTEST))
    words = [
        "history",
        "import",
        "--format=pytest-benchmark",
        f"--input={tmp_path / 'b.json'}",
        f"--history={history.folder}",
    ]
    done = subprocess.run([sys.executable, "-c", LIMITED, "300", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert {path: path.read_bytes() for path in history.files()} == before and history.verify() == {}
    done = subprocess.run(
        [sys.executable, "experiments/benchmarks.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "1 of them new" in done.stdout and len(history.list()) == 2


def test_a_clock_that_was_set_back_orders_runs_by_what_they_say_and_prunes_nothing(tmp_path):
    history = History(tmp_path)
    for days in (1, 400, 2):  # the second was run under a clock of last year
        history.add(record(days))
    assert [row.head for row in history.list()] == ["c400", "c2", "c1"]
    past = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    assert history.prune(now=past, dry_run=False) == [] and len(history.list()) == 3


def test_an_alert_under_a_clock_that_was_set_back_is_neither_lost_nor_repeated(tmp_path):
    book, post = Book(tmp_path), Post()
    settings = Alerts(channels=[{"name": "log", "kind": "file", "path": "x"}])
    book.note(finding("decode.tokens_per_s"), "r1", now=NOON)
    book.send(settings, post, now=NOON)
    for now in (hours(-1000), hours(-1)):
        assert book.send(settings, post, now=now) == []
    assert len(book.send(settings, post, now=hours(24))) == 1


def test_two_processes_that_add_runs_at_once_lose_none(tmp_path):
    workers = [adding(tmp_path, first, 20) for first in (1, 101)]
    for worker in workers:
        worker.communicate(timeout=120)
        assert worker.returncode == 0
    history = History(tmp_path)
    assert len(history.list()) == 40 and history.verify() == {}


def test_two_processes_that_take_in_the_same_runs_open_one_alert_each(tmp_path):
    code = (
        "import sys; from pathlib import Path; from jaxbench.regress.alerts import Book;"
        "from tests.regress.test_alerts import NOON, record\\n"
        "for i in range(30): Book(Path(sys.argv[1])).note(record('decode.flops', base=f'b{i}'), f'r{i}', now=NOON)"
    ).replace("\\n", "\n")
    command, variables = [sys.executable, "-c", code, str(tmp_path)], os.environ | {"PYTHONPATH": str(ROOT)}
    workers = [subprocess.Popen(command, cwd=ROOT, env=variables) for _ in range(3)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    alerts = Book(tmp_path).alerts()
    assert len(alerts) == 30 and {alert.runs for alert in alerts} == {1}
    assert len(Book(tmp_path).path.read_text().splitlines()) == 30


def test_a_kill_at_any_moment_leaves_whole_runs_and_an_index_that_is_made_again(tmp_path):
    worker = adding(tmp_path, 1, 10_000)
    for _ in range(5):
        worker.stdout.readline()
    time.sleep(0.03)
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=60)
    history = History(tmp_path)
    count = len(history.files())
    assert count >= 5 and history.verify() == {} and len(history.list()) == count
    (tmp_path / INDEX).write_bytes((tmp_path / INDEX).read_bytes()[:1000])
    assert len(history.list()) == count
    history.add(record(20_000))
    assert len(history.list()) == count + 1


def running(*words, folder):
    command = [sys.executable, "experiments/benchmarks.py", "run", "--suite=tiny", *words]
    command += [f"--history={folder / 'history'}", f"--workdir={folder / 'work'}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_run_of_another_machine_is_refused_without_a_flag_and_a_damaged_one_is_named(tmp_path):
    history = History(tmp_path / "history")
    id = history.add(record(1))
    done = running(f"--compare_with={id[:12]}", folder=tmp_path)
    assert done.returncode == 2 and "was run on machine abc" in done.stderr and "--other_machine" in done.stderr
    [path] = history.files()
    path.write_bytes(path.read_bytes()[:50])
    done = running(f"--compare_with={id[:12]}", "--other_machine", folder=tmp_path)
    assert done.returncode == 2 and "is damaged or no run" in done.stderr
    assert not (tmp_path / "work" / "samples.jsonl").exists()


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_is_there(tmp_path):
    suite = Suite(model="tiny", cases=[{"name": "words", "workload": "tokenizing"}], requires={"memory_bytes": 0})
    with run.alone(tmp_path / "work"):
        with pytest.raises(ValueError, match="another run works there now; wait for its end"):
            run.run_suite(suite, compare_with=None, device="cpu", workdir=tmp_path / "work", say=lambda text: None)
    assert not (tmp_path / "work").exists()
    with run.alone(tmp_path / "work"):  # the lock went with its holder
        pass
