"""generate.py --tensor_parallel: the texts of one device, and processes that start, fail and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxbench.generation import decoder
from tests.generation import tiny
from tests.structure import ROOT
from tests.test_cli import command, shell_environment

DRAWN = ("--temperature=1", "--new_tokens=30", "--kernels=xla")
SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from absl import flags
from jaxbench import cli
from jaxbench.generation import tensor_parallel

def main():
    what = flags.FLAGS.what
    if "JAXBENCH_FOLLOWS" in os.environ:
        with open({file!r} + ".part", "w") as file:
            json.dump([os.getpid(), os.environ["RANK"], *sys.argv[1:]], file)
        os.rename({file!r} + ".part", {file!r})
        if what.startswith("fail"):
            raise ValueError("no room here")
        time.sleep(100)
    with tensor_parallel.processes(is_streamed=False):
        while what != "fail and be left" or not os.path.exists({file!r}):
            time.sleep(0.05)
        raise RuntimeError("connection closed by peer")

tensor_parallel.define()
flags.DEFINE_string("what", "", "")
flags.DEFINE_bool("stream", None, "")
flags.DEFINE_multi_string("stop", [], "")
cli.run(main)
"""


def generate(folder, backend: str, *words: str, **options):
    return command("generate.py", f"--model={folder}", f"--backend={backend}", *words, OMP_NUM_THREADS="1", **options)


@pytest.mark.parametrize("backend", ["flax", "torch"])
def test_two_devices_write_the_text_of_one(folder, backend):
    one = generate(folder, backend, "--prompt=Once", *DRAWN)
    two = generate(folder, backend, "--prompt=Once", *DRAWN, "--tensor_parallel=2")
    assert one.returncode == two.returncode == 0, two.stderr
    assert two.stdout == one.stdout and len(one.stdout) > 5
    (line,) = two.stderr.splitlines()
    assert line.startswith("4 prompt tokens in ") and line.endswith("; xla kernels, weights float32, 2 devices")


def test_auto_says_why_it_takes_no_native_kernels(folder, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One"}\n{"prompt": "Three"}\n')
    words = (f"--input={source}", f"--output={output}", "--new_tokens=6", "--tensor_parallel=2")
    done = generate(folder, "flax", *words)
    assert done.returncode == 0, done.stderr
    assert "kernels: xla, because native kernels are for one device, and --tensor_parallel=2\n" in done.stderr
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["One", "Three"]


def test_what_is_typed_reaches_every_process(folder):
    words = ["--chat", "--temperature=1", "--new_tokens=9", "--kernels=xla", "--backend=torch", f"--model={folder}"]

    def talked(*more: str):
        return subprocess.run(
            [sys.executable, str(ROOT / "experiments" / "generate.py"), *words, *more], text=True, capture_output=True,
            input="Hi\n" + "x" * 200 + "\nWho?\n", env=shell_environment(OMP_NUM_THREADS="1"), timeout=240,
        )  # fmt: skip

    one, two = talked(), talked("--tensor_parallel=2", "--stream")
    assert one.returncode == two.returncode == 0, two.stderr
    assert two.stdout == one.stdout and len(one.stdout) > 5
    first, refusal, second = two.stderr.splitlines()
    assert first.endswith(", 2 devices") and second.endswith(", 2 devices")
    assert refusal.startswith("error: the message has 217 tokens")


def start(tmp_path, *words: str) -> subprocess.Popen:
    """Start a command that starts a second process, which leaves its id and command line in a file."""
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(root=str(ROOT), file=str(tmp_path / "second.json")))
    return subprocess.Popen(
        [sys.executable, str(script), "--tensor_parallel=2", *words], stderr=subprocess.PIPE, text=True,
        env=shell_environment(),
    )  # fmt: skip


def test_an_interrupt_ends_all_processes_and_the_second_one_has_the_flags_of_the_first(tmp_path):
    process = start(tmp_path, "--what=two\nlines", "--stop=a\nb", "--stop=--c", "--stream", "--monitor")
    second, until = tmp_path / "second.json", time.monotonic() + 120
    while not second.exists() and time.monotonic() < until:
        time.sleep(0.05)
    pid, rank, *words = json.loads(second.read_text())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert (rank, sorted(words)) == (
        "1", ["--stop=--c", "--stop=a\nb", "--stream=false", "--tensor_parallel=2", "--what=two\nlines"]
    )  # fmt: skip
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("what", ["fail and be left", "fail in silence"])
def test_a_second_process_that_fails_ends_the_first_with_its_last_line(tmp_path, what):
    process = start(tmp_path, f"--what={what}")
    _, said = process.communicate(timeout=120)
    wanted = "error: --tensor_parallel=2: process 1 ended with exit code 2: error: no room here\n"
    assert (process.returncode, said) == (2, wanted)


def test_native_kernels_and_their_number_types_are_refused_over_several_devices():
    why = "native kernels are for one device, and --tensor_parallel=2"
    for options, words in {
        decoder.Options("native"): f"--kernels=native: {why}",
        decoder.Options(weights="q8_0"): f"--weights=q8_0 is for native kernels alone \\({why}\\); wanted float32",
        decoder.Options(cache="int8"): f"--cache=int8 is for native kernels alone \\({why}\\)",
    }.items():
        with pytest.raises(ValueError, match=words):
            decoder.choose(options, "cpu", config=lambda: tiny.CONFIG, num_devices=2)
    assert decoder.choose(decoder.Options(), "cpu", num_devices=2).note == f"kernels: xla, because {why}"
