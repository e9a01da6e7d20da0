"""Workers: real commands, ended, killed and broken; the command line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import huggingface_hub
import pytest

from jaxbench.jobs import work
from jaxbench.jobs.queue import HERE, Queue
from jaxbench.pretrained import weights
from tests.jobs.test_queue import die_holding
from tests.structure import ROOT

JOBS = [sys.executable, str(ROOT / "experiments" / "jobs.py")]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Commands of the test's own, in place of the repository's."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    monkeypatch.setattr("jaxbench.jobs.queue.COMMANDS", folder)
    monkeypatch.setattr(work, "COMMANDS", folder)
    monkeypatch.setattr(work, "PAUSE_S", 0.01)

    def add(name: str, code: str) -> tuple[str]:
        (folder / name).write_text(code)
        return (f"experiments/{name}",)

    return add


def run_all(held: Queue, **how) -> work.Workers:
    workers = work.Workers(held, until_empty=True, poll_s=0.01, **how)
    workers.start()
    workers.join()
    return workers


def wait_for(what, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def test_a_command_runs_in_its_folder_and_what_it_says_is_kept(tmp_path, commands):
    held = Queue(tmp_path / "queue")
    words = commands("a.py", "import os, sys; print(os.getcwd(), sys.argv[1:], 'said'); print('late', file=sys.stderr)")
    entry = held.submit((*words, f"--x={HERE}/y"), cwd=HERE)
    assert run_all(held).failed == 0
    entry = held.find(entry.job.id)
    assert entry.progress.state == "done" and entry.progress.exit_code == 0
    assert entry.log.read_text() == f"{entry.folder} ['--x={entry.folder}/y'] said\nlate\n"


def test_words_of_a_command_that_runs_elsewhere_stay_as_they_are(tmp_path, commands):
    held = Queue(tmp_path / "queue")
    cwd = tmp_path / f"a {HERE}"
    cwd.mkdir()
    words = commands("a.py", "import os, sys; print(os.getcwd(), sys.argv[1:])")
    id = held.submit((*words, f"--stop={HERE} a b"), cwd=str(cwd)).job.id
    assert run_all(held).failed == 0
    assert held.find(id).log.read_text() == f"{cwd} ['--stop={HERE} a b']\n"


@pytest.mark.parametrize(("code", "attempts", "note"), [(2, 1, "its input is bad"), (1, 1, "gate"), (7, 3, "it broke")])
def test_bad_input_and_failed_gates_are_final_and_what_breaks_is_run_again(tmp_path, commands, code, attempts, note):
    held = Queue(tmp_path / "queue")
    id = held.submit(commands("a.py", f"print('error: no'); raise SystemExit({code})")).job.id
    assert run_all(held).failed == 1
    progress = held.find(id).progress
    assert (progress.state, progress.exit_code, progress.attempts) == ("failed", code, attempts)
    assert note in progress.note and "error: no" in progress.note


def test_a_command_that_breaks_once_is_done_the_second_time(tmp_path, commands):
    code = "import os, signal\nif not os.path.exists('mark'):\n    open('mark', 'w')\n    os.kill(os.getpid(), 11)\n"
    held = Queue(tmp_path / "queue")
    id = held.submit(commands("a.py", code), cwd=HERE).job.id
    assert run_all(held).failed == 0
    assert held.find(id).progress.state == "done" and held.find(id).progress.attempts == 2


@pytest.mark.parametrize(
    ("code", "attempts"),
    [
        ("raise RuntimeError('a process pool is broken')", 3),
        ("print('error: cannot write x: No space left on device'); raise SystemExit(2)", 3),
        ("print('error: out of memory (no details)'); raise SystemExit(2)", 3),
        ("print('error: a worker process was killed: one of 2'); raise SystemExit(2)", 3),
        ("print('failed: a gate'); raise SystemExit(1)", 1),
    ],
)
def test_what_may_pass_is_run_again_whatever_its_exit_code(tmp_path, commands, code, attempts):
    held = Queue(tmp_path / "queue")
    id = held.submit(commands("a.py", code)).job.id
    run_all(held)
    assert (held.find(id).progress.state, held.find(id).progress.attempts) == ("failed", attempts)


@pytest.mark.parametrize(
    ("reason", "is_final"),
    [
        ("LocalEntryNotFoundError: Got: ConnectError: [Errno -2] Name or service not known", False),
        ("LocalEntryNotFoundError: Got: ReadTimeout: The read operation timed out", False),
        ("ConnectTimeout: timed out", False), ("ConnectionError: no", False), ("RemoteProtocolError: closed", False),
        ("HfHubHTTPError: Server error '503 Service Unavailable' for url 'x'", False),
        ("HfHubHTTPError: 429 Client Error: Too Many Requests for url: x", False),
        ("RepositoryNotFoundError: 404 Client Error. (Request ID: 500)", True),
        ("RepositoryNotFoundError: Client error '404 Not Found' for url 'x/500 '", True),
        ("LocalEntryNotFoundError: Cannot find the files, and outgoing traffic has been disabled.", True),
    ],
)  # fmt: skip
def test_a_hub_that_is_not_reached_may_be_later_and_a_model_that_it_does_not_have_is_bad_input(reason, is_final):
    said = f"error: model: org/ConnectError is no file or folder here, and fetching it as a hub id failed ({reason}); x"
    assert work.is_final(2, said) == is_final


def test_a_model_that_the_network_did_not_bring_has_the_words_that_are_looked_for(monkeypatch):
    def snapshot_download(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match="hub id") as error:
        weights.resolve("org/none")
    assert not work.is_final(2, f"error: {error.value}")


def test_only_what_this_attempt_said_decides_whether_it_is_final(tmp_path, commands):
    code = "import os\nif not os.path.exists('mark'):\n    open('mark', 'w')\n    raise RuntimeError('once')\nexit(2)"
    held = Queue(tmp_path / "queue")
    id = held.submit(commands("a.py", code), cwd=HERE).job.id
    run_all(held)
    assert held.find(id).progress.attempts == 2 and "its input is bad" in held.find(id).progress.note


def test_a_command_that_cannot_be_started_fails_with_the_reason(tmp_path, commands):
    held = Queue(tmp_path / "queue")
    id = held.submit(commands("a.py", ""), cwd=str(tmp_path / "gone"), most_attempts=2).job.id
    assert run_all(held).failed == 1
    progress = held.find(id).progress
    assert (progress.state, progress.attempts) == ("failed", 2) and "cannot be started" in progress.note


def test_a_job_whose_last_worker_died_counts_as_failed_where_it_is_found(tmp_path, commands):
    held = Queue(tmp_path / "queue")
    held.submit(commands("a.py", ""), most_attempts=1)
    die_holding(held.folder)
    assert run_all(held).failed == 1


def test_workers_go_on_where_the_queue_cannot_be_read_for_a_moment(tmp_path, commands, monkeypatch):
    held, ids = Queue(tmp_path / "queue"), []

    def left():
        if ids:
            return False
        ids.append(held.submit(commands("a.py", "")).job.id)  # meanwhile
        raise OSError(116, "Stale file handle")

    workers = work.Workers(held, until_empty=True, poll_s=0.01)
    monkeypatch.setattr(workers, "_left", left)
    workers.start()
    workers.join()
    assert held.find(ids[0]).progress.state == "done"


SLEEP = "import time, sys\nopen('begun', 'w')\nprint('begun', flush=True)\ntime.sleep(600)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


@pytest.mark.parametrize("code", [SLEEP, STUBBORN], ids=["willing", "stubborn"])
def test_a_job_that_runs_is_cancelled_soon(tmp_path, commands, code, monkeypatch):
    monkeypatch.setattr(work, "GRACE_S", 0.3)
    held = Queue(tmp_path / "queue")
    entry = held.submit(commands("a.py", code), cwd=HERE)
    workers = work.Workers(held, until_empty=True, poll_s=0.01)
    workers.start()
    wait_for((entry.folder / "begun").exists)
    held.cancel(entry.job.id)
    workers.join()
    assert held.find(entry.job.id).progress.state == "cancelled"


def test_workers_that_are_told_to_end_put_down_what_they_run_and_the_attempt_does_not_count(tmp_path, commands):
    held = Queue(tmp_path / "queue")
    entry = held.submit(commands("a.py", SLEEP), cwd=HERE, most_attempts=1)
    workers = work.Workers(held, poll_s=0.01)
    workers.start()
    wait_for((entry.folder / "begun").exists)
    workers.stop()
    workers.join()
    progress = held.find(entry.job.id).progress
    assert (progress.state, progress.attempts) == ("waiting", 0)


def test_several_workers_run_jobs_at_once(tmp_path, commands):
    code = "import os, time\nopen(f'../mark-{os.getpid()}', 'w')\nend = time.time() + 60\n"
    code += "while sum(n.startswith('mark-') for n in os.listdir('..')) < 2 and time.time() < end: time.sleep(0.02)\n"
    code += "raise SystemExit(time.time() >= end)\n"
    held = Queue(tmp_path / "queue")
    words = commands("a.py", code)
    for _ in range(2):
        held.submit(words, cwd=HERE)
    assert run_all(held, count=2).failed == 0


def call(*words: str, code: int = 0) -> str:
    done = subprocess.run([*JOBS, *words], capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="a process ends with its parent on Linux alone")
def test_a_killed_worker_takes_its_command_along_and_the_next_goes_on(tmp_path):
    place = f"--queue={tmp_path / 'queue'}"
    texts = tmp_path / "texts.txt"
    texts.write_text("one two three four five\n" * 300_000)
    command = ["experiments/watermark.py", "identify", "--backend=numpy", "--schemes=kgw_transformers"]
    command += [f"--input={texts}", f"--output={tmp_path / 'scores.csv'}"]
    id = call("submit", place, f"--command={shlex.join(command)}").strip()
    worker = subprocess.Popen([*JOBS, "work", place], stderr=subprocess.PIPE, text=True, env=os.environ)
    parts = tmp_path / "scores.csv.parts"
    wait_for(lambda: parts.is_dir() and any(parts.glob("[0-9]*.json")))
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    wait_for(
        lambda: str(tmp_path) not in subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
    )
    done = len(list(parts.glob("[0-9]*.json")))
    assert 0 < done < 74, "the test wants a command that is killed half-way"
    texts_done = {path.name for path in parts.glob("[0-9]*.json")}
    call("work", place, "--until_empty")
    shown = json.loads(call("show", place, f"--job={id[:18]}").partition("\n}")[0] + "}")
    assert (shown["state"], shown["attempts"]) == ("done", 2) and texts_done
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 300_001


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_end_waits_until_its_command_has_ended_and_its_job_waits_again(tmp_path, number):
    place = f"--queue={tmp_path / 'queue'}"
    never = call("submit", place, "--command=experiments/watermark.py keygen", "--priority=-1").strip()
    command = ["experiments/jobs.py", "wait", place, f"--job={never}"]
    id = call("submit", place, f"--command={shlex.join(command)}").strip()
    worker = subprocess.Popen([*JOBS, "work", place], stderr=subprocess.PIPE, text=True, env=os.environ)
    assert json.loads(worker.stderr.readline())["event"] == "job started"
    worker.send_signal(number)
    said = worker.communicate()[1].splitlines()
    assert worker.returncode == 130 and said[-1].startswith("interrupted; what ran waits again"), said
    assert [json.loads(line)["event"] for line in said[:-1]] == ["job interrupted"]
    progress = Queue(tmp_path / "queue").find(id).progress
    assert (progress.state, progress.attempts) == ("waiting", 0)


def test_the_command_line_runs_a_job_from_its_submission_to_its_removal(tmp_path):
    place = f"--queue={tmp_path / 'queue'}"
    assert call("list", place) == f"{tmp_path / 'queue'} holds no jobs\n"
    key = shlex.join(["experiments/watermark.py", "keygen", f"--output={tmp_path / 'key'}"])
    good, bad = (call("submit", place, f"--command={words}", "--title=keys").strip() for words in (key, key))
    assert "waiting" in call("list", place) and "keys" in call("list", place)
    done = subprocess.run([*JOBS, "work", place, "--until_empty"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1, "the second key would be written over the first"
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(each["job"], each["event"]) for each in events] == [
        (good, "job started"), (good, "job done"), (bad, "job started"), (bad, "job failed")
    ]  # fmt: skip
    assert call("wait", place, f"--job={good}") == f"{good} done\n"
    assert "a key that is written over is lost" in call("wait", place, f"--job={bad}", code=2)
    assert "written: " in call("show", place, f"--job={good}")
    assert call("retry", place, f"--job={bad}") == f"{bad} waiting\n"
    assert call("cancel", place, f"--job={bad}") == f"{bad} cancelled\n"
    (tmp_path / "queue" / bad / "state.json").write_text("")
    assert "damaged" in call("list", place)
    assert call("show", place, f"--job={bad}", code=2) == "", "the error says which file"
    for id in (good, bad):
        assert call("remove", place, f"--job={id}") == f"{id} removed\n"
    assert call("list", place).endswith("holds no jobs\n")


def test_brackets_in_a_command_or_a_title_are_listed_as_they_are(tmp_path):
    place, words = f"--queue={tmp_path}", "experiments/generate.py '--stop=[/INST]' --prompt=:x:"
    call("submit", place, f"--command={words}")
    call("submit", place, f"--command={words}", "--title=for [red] and [/blue]")
    listed = call("list", place)
    assert words in listed and "for [red] and [/blue]" in listed


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process's memory cannot be limited")
def test_the_end_of_a_log_that_is_larger_than_memory_is_shown(tmp_path):
    id = call("submit", f"--queue={tmp_path}", "--command=experiments/watermark.py keygen").strip()
    with open(tmp_path / id / "log.txt", "wb") as log:
        log.truncate(3 * 2**30)
        log.seek(0, os.SEEK_END)
        log.write(b"\nthe last line\n")
    limited = ["bash", "-c", 'ulimit -v 2000000; exec "$@"', "-", *JOBS, "show", f"--queue={tmp_path}", f"--job={id}"]
    shown = subprocess.run(limited, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.endswith("\nthe last line\n"), shown.stderr


READ_ONLY = """
import errno, runpy, sys, tempfile

def full(*given, **how):
    raise OSError(errno.EROFS, "Read-only file system")

tempfile.TemporaryFile = full
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_queue_on_a_disk_that_takes_nothing_can_be_read_but_not_changed(tmp_path):
    id = Queue(tmp_path / "queue").submit(("experiments/watermark.py", "keygen")).job.id
    command = [JOBS[0], "-c", READ_ONLY, JOBS[1]]
    for name, words, code, said in (
        ("list", (), 0, "keygen"), ("show", (f"--job={id}",), 0, id), ("cancel", (f"--job={id}",), 2, "Read-only file"),
    ):  # fmt: skip
        words = [*command, name, f"--queue={tmp_path / 'queue'}", *words]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
