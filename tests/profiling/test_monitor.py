"""What a running process does: rates of its rows, its memory, who keeps the others waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types

import pytest

from jaxbench.profiling import compare, monitor
from tests.structure import ROOT

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


@pytest.mark.parametrize("beyond", ["", '{"step": 2, "tok'])
def test_rates_are_those_of_the_last_complete_line_whatever_its_text_holds(tmp_path, beyond):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    watched = monitor.Watched(os.getpid(), [str(rows)])
    rows.write_text('{"step": 1, "tokens_per_s": 2.5, "text": "a\u2028b\u0085"}\n' + beyond, encoding="utf-8")
    assert watched.look().rates == {"step": 1, "tokens_per_s": 2.5}


def test_what_an_earlier_run_wrote_into_a_file_is_no_rate(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n" * 1000)
    watched = monitor.Watched(os.getpid())
    with open(rows, "a", encoding="utf-8") as file:
        assert watched.look().rows_per_s["rows.jsonl"] == 0
        file.write("{}\n" * 10)
        file.flush()
        assert watched.look().rows_per_s["rows.jsonl"] > 0


def test_a_look_reads_what_is_new_in_a_file_and_not_all_of_it(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n" * 10 + "{")
    end = rows.stat().st_size
    assert monitor._new_lines(rows, 0) == (10, end)
    with open(rows, "r+b") as file:
        file.write(b" " * 30)  # not read again
        file.seek(end)
        file.write(b"}\n{}\n")
    assert monitor._new_lines(rows, end) == (2, end + 5)
    rows.write_text("{}\n")
    assert monitor._new_lines(rows, end) == (0, 3)


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    files = [tmp_path / "a" / "rows.jsonl", tmp_path / "b" / "rows.jsonl"]
    for file in files:
        file.parent.mkdir()
        file.write_text("")
    watched = monitor.Watched(os.getpid(), [str(file) for file in files])
    files[0].write_text("{}\n")
    found = watched.look().rows_per_s
    assert found["a/rows.jsonl"] > 0 and found["b/rows.jsonl"] == 0


def test_a_file_that_is_no_jsonl_is_refused_and_for_s_is_kept(tmp_path):
    (tmp_path / "rows.csv").write_text("a\n")
    script = [sys.executable, "experiments/profile.py", "monitor", f"--pid={os.getpid()}"]
    done = subprocess.run([*script, f"--rows={tmp_path}/rows.csv"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "rows.csv is no .jsonl file" in done.stderr
    subprocess.run([*script, "--for_s=0.2", "--interval_s=3600"], cwd=ROOT, check=True, timeout=240)


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


FAMILY = """
import subprocess, sys
child = "import sys, time\\nwhile time.process_time() < 1.5: pass\\nprint('spent', flush=True)\\nsys.stdin.read()"
process = subprocess.Popen([sys.executable, "-c", child], stdin=sys.stdin)
process.wait()
"""


def test_what_a_child_did_before_the_first_look_is_not_counted():
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "spent\n"  # 1.5 s of the processor, and it waits from here on
        watched = monitor.Watched(process.pid)
        known, look = dict(watched._known), watched.look()
        process.stdin.close()
    [child] = known.keys() - {process.pid}
    assert known[child] > 1.4 and look.cores[child] < 50  # counted whole in a look of milliseconds, hundreds


def test_a_new_child_is_counted_over_its_life_and_a_known_one_since_the_last_look(monkeypatch):
    watched = object.__new__(monitor.Watched)
    watched._known = {1: 10.0, 2: 10.0}
    monkeypatch.setattr(monitor.time, "time", lambda: 100.0)
    process = lambda pid, born: types.SimpleNamespace(pid=pid, create_time=lambda: born)
    assert watched._share(process(1, 0.0), 12.0, 4.0) == 0.5
    assert watched._share(process(2, 99.0), 0.5, 4.0) == 0.0  # another process has the number now
    assert watched._share(process(3, 80.0), 10.0, 0.01) == 0.5  # 20 s old, and seen for the first time
    assert watched._share(process(4, 99.0), 1.0, 4.0) == 0.25  # born within the interval


@pytest.mark.parametrize("scopes", [1, [1], [{"name": "a", "kind": "clock", "count": 1, "seconds": "x", "share": 0.1}]])
def test_scopes_that_are_none_are_refused_and_an_earlier_profile_has_none(tmp_path, scopes):
    path = tmp_path / "operations.json"
    path.write_text(json.dumps({"rows": []}))
    assert compare.read(str(tmp_path), "operations.json", flag="--trace") == {"rows": []}
    path.write_text(json.dumps({"rows": [], "scopes": scopes}))
    with pytest.raises(ValueError, match=r"operations.json is not what --profile=FOLDER writes"):
        compare.read(str(tmp_path), "operations.json", flag="--trace")
