"""The start-up command as a shell calls it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.generation import tiny
from tests.structure import ROOT

if not tiny.has_native():
    pytest.skip(tiny.NEEDS_NATIVE, allow_module_level=True)


def call(*words):
    command = [sys.executable, str(ROOT / "experiments" / "startup.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240)


def test_a_load_is_timed_in_every_round(tmp_path):
    words = [f"--model={tiny.make(tmp_path / 'tiny')}", "--only=load, Flax", "--rounds=2"]
    done = call(*words, f"--output={tmp_path / 'startup.json'}")
    assert done.returncode == 0, done.stderr
    assert "load, Flax native" in done.stdout
    record = json.loads((tmp_path / "startup.json").read_text())
    assert [len(found) for found in record["seconds"].values()] == [2]
    assert all(0 < each < 60 for each in record["seconds"]["load, Flax native"])


def test_a_program_that_fails_and_a_row_that_is_not_there_are_one_line_each(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    done = call(f"--model={tmp_path / 'model.gguf'}", "--only=load, Flax")
    assert done.returncode == 2 and "truncated GGUF file" in done.stderr and "Traceback" not in done.stderr
    done = call("--only=lode")
    assert done.returncode == 2 and "--only=lode is in no row's name" in done.stderr


def test_an_interrupt_keeps_the_rounds_that_are_done_and_an_output_is_replaced_where_that_is_asked(tmp_path):
    output = tmp_path / "startup.json"
    output.write_text("{}")
    words = [f"--model={tiny.make(tmp_path / 'tiny')}", "--only=Python and JAX", "--rounds=1000", f"--output={output}"]
    command = [sys.executable, str(ROOT / "experiments" / "startup.py"), *words, "--overwrite"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ, cwd=ROOT)
    deadline = time.monotonic() + 120
    while output.read_text() == "{}" and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    last = process.communicate(timeout=60)[1].strip().splitlines()[-1]
    (rounds,) = map(len, json.loads(output.read_text())["seconds"].values())
    assert process.returncode == 130 and rounds >= 1
    assert last == f"interrupted; {rounds} of 1000 rounds are in {output}"
