"""experiments/generate.py as a user runs it: prompts, conversations, files, interrupts."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time

import pytest

from jaxbench import store
from tests.generation import tiny
from tests.structure import ROOT
from tests.test_cli import command, refused, shell_environment

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # PyTorch's threads would wait for each other more than they compute
MAIN = str(ROOT / "experiments" / "generate.py")


def generate(folder, *arguments: str, **options):
    return command("generate.py", f"--model={folder}", "--backend=torch", *arguments, **ONE_THREAD | options)


def nowhere(folder) -> dict[str, str]:
    """Return an environment in which no compiler is found and no built kernels are."""
    compiler = {"CC": "no-such-compiler", "PATH": str(folder), "JAXBENCH_INSTRUCTIONS": "portable"}
    return compiler | {"JAXBENCH_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}


def test_the_text_is_on_standard_output_and_one_line_about_it_on_standard_error(folder, text):
    options = ("--prompt=Once", "--temperature=1", "--new_tokens=30", "--kernels=xla")
    whole, streamed = generate(folder, *options), generate(folder, *options, "--stream")
    assert whole.returncode == streamed.returncode == 0, whole.stderr
    assert whole.stdout == streamed.stdout and len(whole.stdout) > 5
    (line,) = whole.stderr.splitlines()
    assert line.startswith("4 prompt tokens in ") and line.endswith("; xla kernels, weights float32")


@pytest.mark.skipif(not tiny.has_native(), reason=tiny.NEEDS_NATIVE)
def test_auto_takes_native_kernels_in_the_number_types_asked_for(folder):
    types = ("--weights=q8_0", "--cache=int8", "--activations=int8")
    done = generate(folder, "--prompt=Once", *types, "--threads=1", "--new_tokens=9")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("; native kernels, weights q8_0, cache int8, activations int8\n")


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is not None, reason="the package ziglang brings a compiler")
def test_without_a_compiler_the_text_comes_with_one_line_that_says_so(folder, tmp_path):
    there = nowhere(tmp_path)
    done = generate(folder, "--prompt=Once", "--new_tokens=4", **there)
    assert done.returncode == 0, done.stderr
    note, line = done.stderr.splitlines()
    assert note.startswith("kernels: xla, because native kernels: ") and "install a C compiler" in note
    assert line.endswith("; xla kernels, weights float32")
    error = refused(generate(folder, "--prompt=Once", "--kernels=native", **there), "--kernels=native: native kernels")
    assert "install a C compiler" in error


def test_a_line_that_is_no_utf_8_is_refused_alone_and_the_conversation_goes_on(folder):
    arguments = [f"--model={folder}", "--backend=torch", "--chat", "--new_tokens=5", "--kernels=xla"]
    done = subprocess.run(
        [sys.executable, MAIN, *arguments], input=b"Hi\n\xff bad\nWho?\n", capture_output=True,
        env=shell_environment(**ONE_THREAD, PYTHONIOENCODING="utf-8:strict"), timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, refusal, second = done.stderr.decode().splitlines()
    assert first.startswith("19 prompt tokens in ") and second.startswith("55 "), done.stderr
    assert refusal == "error: the message has a lone surrogate, which is no Unicode text: '\\udcff bad'"


def test_a_pipe_is_read_once_and_rows_of_another_pipe_are_not_taken_for_its_own(folder, tmp_path):
    arguments = [f"--model={folder}", "--backend=torch", "--new_tokens=2", "--kernels=xla", "--input=/dev/stdin"]
    output = tmp_path / "out.jsonl"

    def piped(text):
        return subprocess.run(
            [sys.executable, MAIN, *arguments, f"--output={output}"], input=text, capture_output=True, text=True,
            env=shell_environment(**ONE_THREAD), timeout=240,
        )  # fmt: skip

    one, other = '{"prompt": "One"}\n', '{"prompt": "Two"}\n'
    done = piped(one)
    assert done.returncode == 0, done.stderr
    refused(piped(other), f"--output={output} holds rows made with other input_sha256")
    again = piped(one)
    assert again.returncode == 0 and again.stderr == f"{output} has all 1 rows\n", again.stderr
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["One"]


def test_a_conversation_reads_lines_and_answers_each(folder):
    arguments = [f"--model={folder}", "--backend=torch", "--chat", "--new_tokens=5", "--kernels=xla"]
    done = subprocess.run(
        [sys.executable, MAIN, *arguments], input="Hi\n" + "x" * 200 + "\nWho?\n", capture_output=True, text=True,
        env=shell_environment(**ONE_THREAD), timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, refusal, second = done.stderr.splitlines()
    assert first.startswith("19 prompt tokens in ") and second.startswith("55 "), done.stderr
    assert refusal.startswith("error: the message has 217 tokens")


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_an_interrupted_run_keeps_its_rows_and_the_same_command_goes_on(folder, tmp_path, more):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"Number {i}"}) + "\n" for i in range(20)))
    words = [f"--model={folder}", "--backend=torch", f"--input={source}", "--new_tokens=80", "--temperature=1"]
    words += ["--batch_size=1", "--kernels=xla"]
    started = [sys.executable, MAIN, *words, f"--output={output}"]
    process = subprocess.Popen(
        [*started, *more], env=shell_environment(**ONE_THREAD), stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    # the second row: an interrupt while the first is on its way to the disk takes it back
    while not (output.exists() and output.read_bytes().count(b"\n") > 1) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 130, stderr
    (line,) = stderr.splitlines()
    again = "the same command without --overwrite" if more else "the same command"  # with it, it starts anew
    assert line == f"interrupted; finished rows in {output} are kept; {again} goes on"
    kept = output.read_bytes()
    assert 0 < kept.count(b"\n") < 20 and kept.endswith(b"\n")
    done = command("generate.py", *words, f"--output={output}", "--batch_size=20", **ONE_THREAD)
    assert done.returncode == 0 and f"has {len(kept.splitlines())} of 20 rows, going on" in done.stderr, done.stderr
    assert done.stdout == f"written: {output}\n"
    rows = output.read_bytes()
    assert rows.startswith(kept) and rows.count(b"\n") == 20


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is not None, reason="the package ziglang brings a compiler")
def test_an_interrupt_before_the_first_row_does_not_say_that_rows_of_an_earlier_run_go_on(folder, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once"}\n' * 40)
    words = [f"--model={folder}", "--backend=torch", f"--input={source}", f"--output={output}", "--batch_size=40"]
    assert command("generate.py", *words, "--new_tokens=2", "--kernels=xla", **ONE_THREAD).returncode == 0
    earlier = output.read_bytes()
    process = subprocess.Popen(
        [sys.executable, MAIN, *words, "--new_tokens=120", "--overwrite"], stderr=subprocess.PIPE, text=True,
        env=shell_environment(**ONE_THREAD, **nowhere(tmp_path)),
    )  # fmt: skip
    assert process.stderr.readline().startswith("kernels: xla, because")  # the model is loaded
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=120)[1]
    assert (process.returncode, stderr) == (130, "interrupted; nothing was finished\n")
    assert output.read_bytes() == earlier


def test_a_file_that_another_process_writes_is_refused_at_once(folder, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once"}\n')
    with store.alone(output):
        refused(
            generate(folder, f"--input={source}", f"--output={output}", "--new_tokens=2", "--kernels=xla"),
            f"another process writes {output}; wait for its end, or name another output",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
