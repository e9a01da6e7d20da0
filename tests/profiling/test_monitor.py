"""What a running process does: rates of its rows, its memory, who keeps the others waiting."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from jaxbench.profiling import compare, monitor

WRITER = """
import json, sys
file = open(sys.argv[1], "a", buffering=1)
for line in sys.stdin:
    file.write(json.dumps({"step": int(line), "tokens_per_s": 2.5, "loss": 1}) + "\\n")
    print("done", flush=True)
"""


def test_rows_rates_and_the_end_of_a_process_are_seen(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(rows)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        watched = monitor.Watched(process.pid, [str(tmp_path)])
        for step in range(3):
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
            process.stdout.readline()
        look = watched.look()
        assert look.rows_per_s["rows.jsonl"] > 0 and look.rates == {"step": 2, "tokens_per_s": 2.5}
        assert look.resident_bytes > 2**20 and look.threads >= 1
        assert "rows/s" in monitor.sentence(look) and "tokens_per_s 2.5" in monitor.sentence(look)
        assert watched.look().rows_per_s["rows.jsonl"] == 0
        process.stdin.close()
        process.wait()
    assert watched.look() is None


def test_a_worker_that_computes_while_the_others_wait_is_a_straggler():
    assert monitor.stragglers({1: 0.98, 2: 0.02, 3: 0.0, 4: 0.01}) == [1]
    assert monitor.stragglers({1: 0.9, 2: 0.95, 3: 0.9}) == []
    assert monitor.stragglers({1: 0.0, 2: 0.1, 3: 0.0}) == []
    assert monitor.stragglers({1: 0.9, 2: 0.0}) == []


def test_lines_that_are_no_rows_have_no_rates():
    assert [monitor.rates_of(line) for line in ("", "{", "[1]", '{"a_per_s": "fast"}')] == [{}] * 4


def test_a_block_is_watched_and_said():
    said, heard = [], threading.Event()

    def say(text):
        said.append(text)
        heard.set()

    with monitor.running([], interval_s=0.01, say=say):
        assert heard.wait(120)
    assert said[0].startswith("monitor: ") and "MiB" in said[0]


def test_no_process_is_refused():
    with pytest.raises(ValueError, match="--pid=999999999"):
        monitor.Watched(999999999)


def test_operations_of_two_profiles_are_paired_by_name_most_moved_first():
    base = [{"name": "a", "seconds": 1.0, "calls": 2}, {"name": "gone", "seconds": 0.2, "calls": 1}]
    head = [{"name": "a", "seconds": 1.5, "calls": 2}, {"name": "new", "seconds": 0.1, "calls": 1}]
    assert compare.operations(base, head) == [
        ("a", 1.0, 1.5, (2, 2)), ("gone", 0.2, 0.0, (1, 0)), ("new", 0.0, 0.1, (0, 1)),
    ]  # fmt: skip
