"""A command's own lines: the one that computes, the one that allocates."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from shlex import quote

import psutil
import pytest

from jaxbench import cli
from jaxbench.profiling import child, host
from tests.structure import ROOT
from tests.test_cli import command, shell_environment

TOOLS = [
    "thread",
    pytest.param("py-spy", marks=pytest.mark.skipif(host.py_spy() is None, reason="py-spy is not installed")),
]

BUSY = """
import time

def busy():
    total = 0
    while time.process_time() < 2:
        total += 1  # the busy line
    return total

busy()
"""
TWO_SECONDS = """
import time

started = time.monotonic()
while time.monotonic() - started < 2:
    pass
with open(__file__ + ".seconds", "w") as file:  # longer than 2 on a busy machine
    file.write(str(time.monotonic() - started))
"""
GROWS = """
import time

kept = bytearray(50 * 2**20)
time.sleep(0.3)
brief = bytes(150 * 2**20)  # over twice as much: seen whatever the last snapshot took
time.sleep(1.5)
del brief
moment = bytes(300 * 2**20); del moment  # untouched memory, there for microseconds
time.sleep(0.2)
"""
WAITS = """
import pathlib, sys, time

try:
    pathlib.Path(sys.argv[1], "started").touch()
    while True:
        sum(range(1000))
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1], "cleaned").touch()
    raise SystemExit(5)
"""
LARGE = """
block = [bytes(1000) for _ in range(20_000)]  # the large line
"""


def line_of(text: str, words: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


def written(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("tool", TOOLS)
def test_the_function_that_computes_is_the_heaviest(tmp_path, tool):
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    found = host.cpu([str(script)], rate=50, use=tool)
    assert (found.tool, found.exit_code) == (tool, 0)
    lines = [line for line in host.by_line(found.stacks) if line.function == "busy"]
    places = {f"{script}:{line_of(BUSY, words)}" for words in ("while", "the busy line")}
    assert {line.place for line in lines} <= places and sum(line.own for line in lines) > 0.3


def test_the_line_that_allocates_is_the_heaviest(tmp_path):
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    found = host.memory([str(script)], use="tracemalloc")
    first = host.by_line(found.stacks)[0]
    assert first.place == f"{script}:{line_of(LARGE, 'the large line')}" and first.own_weight > 20_000 * 1000


@pytest.mark.parametrize(("rate", "tool"), [(50, "thread"), (1000, "thread"), (50, TOOLS[1])])
def test_the_seconds_of_a_command_are_those_of_the_clock_at_any_rate(tmp_path, rate, tool):
    script = written(tmp_path / "two.py", TWO_SECONDS)
    found = host.cpu([str(script)], rate=rate, use=tool)
    seconds = found.scale * sum(weight for stack, weight in found.stacks if stack[-1][1].endswith("two.py"))
    own = float((tmp_path / "two.py.seconds").read_text())
    assert 0.8 * own < seconds < 1.5 + own, found


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_threads_that_outlive_the_script_are_sampled_to_their_end(tmp_path, end):
    script = tmp_path / "script.py"
    work = "def work():\n    import time\n    time.sleep(1)\n"
    script.write_text(f"import threading\n{work}threading.Thread(target=work).start()\n{end}\n")
    found = host.cpu([str(script)], rate=100, use="thread")
    assert found.exit_code == 0
    assert sum(weight for _, weight in found.stacks) * found.scale > 0.9


@pytest.mark.parametrize("tool", TOOLS)
def test_what_starts_the_command_is_in_no_stack(tmp_path, tool):
    found = host.cpu([str(written(tmp_path / "two.py", TWO_SECONDS))], rate=100, use=tool)
    assert not any(file == host.CHILD_FILE for stack, _ in found.stacks for _, file, _ in stack)
    assert max(found.stacks, key=lambda each: each[1])[0][0][:2] == ("<module>", str(tmp_path / "two.py"))


def test_the_peak_is_the_true_one_and_the_lines_are_of_all_that_was_held(tmp_path):
    found = host.memory([str(written(tmp_path / "grows.py", GROWS))], use="tracemalloc")
    lines = {line.place.rpartition(":")[2]: line.own_weight / 2**20 for line in host.by_line(found.stacks)}
    assert 350 < found.peak / 2**20 < 355
    held = {number: lines.get(str(line_of(GROWS, words)), 0) for number, words in ((50, "kept ="), (150, "brief ="))}
    assert held == pytest.approx({50: 50, 150: 150}, abs=0.1)


def test_what_is_held_for_a_while_is_seen_once_a_snapshots_pause_is_over():
    allocations = child.Allocations()
    try:
        kept = bytearray(50 * 2**20)
        allocations.look()
        allocations._next_s = 0.0  # however long the snapshot took
        brief = bytearray(15 * 2**20)  # below half as much again
        allocations.look()
        del brief
    finally:
        allocations.end()
    sizes = sorted(allocations.found.values(), reverse=True)
    assert len(kept) == 50 * 2**20
    assert [size / 2**20 for size in sizes[:2]] == pytest.approx([50, 15], abs=0.1)


def test_twice_as_much_is_seen_while_a_snapshots_pause_still_lasts():
    allocations = child.Allocations()
    try:
        held = [bytearray(2**23)]
        allocations.look()
        first, allocations._next_s = allocations._most, math.inf
        assert first > 2**23
        held.append(bytearray(first))  # a little below twice and MORE: it waits
        allocations.look()
        assert allocations._most == first
        held.append(bytearray(2 * child.MORE))
        allocations.look()
        assert allocations._most > 2 * first + child.MORE and len(held) == 3
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("text", "code"), [("raise SystemExit(3)", 3), ("1 / 0", 1), ("raise SystemExit('no')", 1), ("raise SystemExit", 0)]
)
def test_the_exit_code_of_the_command_is_handed_on(tmp_path, tool, text, code):
    script = written(tmp_path / "ends.py", f"sum(range(3_000_000))\n{text}\n")
    assert host.cpu([str(script)], rate=100, use=tool).exit_code == code


def test_a_command_that_fails_is_shown_and_said_with_its_own_words(tmp_path):
    script = written(tmp_path / "ends.py", "import sys\nsum(range(3_000_000))\nsys.exit('its own words')\n")
    done = command("profile.py", "cpu", f"--command={quote(str(script))}")
    assert (done.returncode, done.stderr.splitlines()) == (
        1, ["its own words", "failed: the command ended with exit code 1; its profile ends there"],
    ), done.stderr  # fmt: skip
    assert str(script) in done.stdout and "py-spy>" not in done.stdout


def test_a_command_that_is_killed_is_a_failed_one(tmp_path):
    script = written(tmp_path / "ends.py", "import os\nsum(range(3_000_000))\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(cli.GateFailed, match="exit code -9 before its profile was kept"):
        host.cpu([str(script)], rate=100, use="thread")
    if host.py_spy() is not None:
        assert host.cpu([str(script)], rate=100, use="py-spy").exit_code is None


@pytest.mark.parametrize(
    "words", [("cpu", "--tool=py-spy"), ("cpu", "--tool=thread"), ("memory", "--tool=tracemalloc")]
)
def test_an_interrupt_of_the_parent_ends_the_command_and_shows_what_was_sampled(tmp_path, words):
    if "--tool=py-spy" in words and host.py_spy() is None:
        pytest.skip("py-spy is not installed")
    script = written(tmp_path / "waits.py", WAITS)
    started = [sys.executable, str(ROOT / "experiments" / "profile.py"), *words, f"--output={tmp_path / 'p'}"]
    process = subprocess.Popen(
        [*started, f"--command={quote(str(script))} {quote(str(tmp_path))}"],
        cwd=ROOT, env=shell_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    below = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and (tmp_path / "cleaned").exists()
    assert err.splitlines() == ["interrupted; the profile is of what ran until then"]
    assert [each for each in below if each.is_running()] == []
    assert " MiB; the lines are of " in out if words[0] == "memory" else f"{script}:{line_of(WAITS, 'sum')}" in out
    assert json.loads((tmp_path / "p" / "lines.json").read_text())


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["leaks", "--call=waits.py:f"], "interrupted; nothing was finished"),
        (["monitor", f"--pid={os.getpid()}", "--interval_s=0.1"], f"interrupted; process {os.getpid()} goes on"),
    ],
    ids=["leaks", "monitor"],  # not the process's id, which differs between processes that share the tests
)
def test_an_interrupt_says_no_more_than_what_is_so(tmp_path, words, last):
    written(tmp_path / "waits.py", "import time\n\ndef f():\n    print('called', flush=True)\n    time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "experiments" / "profile.py"), *words],
        cwd=tmp_path, env=shell_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline()  # it runs
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1].strip() == last and process.returncode == 130


def test_what_does_not_end_at_an_interrupt_is_killed(tmp_path):
    text = "import os, signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    words = [sys.executable, str(written(tmp_path / "stays.py", text))]
    with open(tmp_path / "pid", "w") as file:
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        assert host.run(words, grace_s=0.5, stdout=file) == (-signal.SIGTERM, True)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_reader_that_closes_the_output_ends_the_command_quietly(tmp_path, tool):
    script = written(tmp_path / "prints.py", "for number in range(300_000):\n    print(number)\n")
    words = [sys.executable, "experiments/profile.py", "cpu", f"--tool={tool}", f"--command={quote(str(script))}"]
    process = subprocess.Popen(
        words, cwd=ROOT, env=shell_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141
    process.stderr.close()


def test_a_closed_output_is_no_fault_of_py_spy_that_found_the_command_too_late(tmp_path, monkeypatch):
    """A tracer that keeps nothing stands for py-spy on a busy machine, where the command ends before it is found."""
    late = written(tmp_path / "late.sh", '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; "$@"; exit 1\n')
    late.chmod(0o700)
    monkeypatch.setattr(host, "py_spy", lambda: late)
    with pytest.raises(BrokenPipeError, match="exit code 141 before a profile was kept"):
        host._py_spy([str(written(tmp_path / "closed.py", "raise BrokenPipeError"))], tmp_path, 100)
    with pytest.raises(ValueError, match="py-spy wrote no samples"):
        host._py_spy([str(written(tmp_path / "short.py", "raise SystemExit(3)"))], tmp_path, 100)


def test_folded_stacks_are_read_and_counted_by_line():
    text = "<module> (/a/b.py:5);f (/a/b.py:2) 3\n<module> (/a/b.py:5) 1\n"
    first, second = host.by_line(list(host.folded(text)))
    assert first == ("/a/b.py:2", "f", 0.75, 0.75, 3) and second == ("/a/b.py:5", "<module>", 0.25, 1.0, 1)


def test_a_command_starts_in_the_environment_that_it_would_start_itself_anew_for():
    assert host.environment(["a.py", "--device=cpu"])["JAX_PLATFORMS"] == "cpu"
    assert host.environment(["a.py", "--device", "gpu"])["JAX_PLATFORMS"] == "cuda,cpu"


def test_words_begin_with_a_script_or_a_module():
    assert host.words_of("python3.11 -m json.tool --help") == ["-m", "json.tool", "--help"]
    with pytest.raises(ValueError, match="no Python script"):
        host.words_of("ls")


def test_the_standard_library_finds_its_own_profile_beside_the_command_of_that_name():
    code = "import sys; sys.path.insert(0, 'experiments'); import cProfile, profile; print(profile.Profile.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "Profile"), done.stderr
