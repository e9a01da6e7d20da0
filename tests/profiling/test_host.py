"""A command's own lines: the one that computes, the one that allocates."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxbench.profiling import host
from tests.structure import ROOT

BUSY = """
import time

def busy():
    total = 0
    while time.process_time() < 2:
        total += 1  # the busy line
    return total

busy()
"""
LARGE = """
block = [bytes(1000) for _ in range(20_000)]  # the large line
"""


def line_of(text: str, words: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


@pytest.mark.parametrize("tool", ["py-spy", "thread"])
def test_the_function_that_computes_is_the_heaviest(tmp_path, tool):
    if tool == "py-spy" and host.py_spy() is None:
        pytest.skip("py-spy is not installed")
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


def test_the_exit_code_of_the_command_is_handed_on(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    assert host.cpu([str(script)], rate=100, use="thread").exit_code == 3


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
