"""The parity command: exit codes, files, and what it says about a broken twin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INJECTED = """
import runpy, sys
from jaxbench.parity import mutation
sys.argv = ["parity.py", "--case=transformer/llama-grouped", "--quick", "--workdir={workdir}"]
[bug] = [bug for bug in mutation.MUTATIONS if bug.name == "rope-base"]
with bug.injected():
    runpy.run_path("experiments/parity.py", run_name="__main__")
"""


def run(*arguments):
    command = [sys.executable, "experiments/parity.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case=transformer/smollm"], "nearest: transformer/smollm2"),
        ([], "name a case with --case=ID, or pass --all"),
        (["--case=transformer/gpt2", "--all"], "--case=transformer/gpt2 and --all exclude each other"),
        (["--case=transformer/gpt2", "--backend=torch"], "flax|equinox"),
        (["--cases=transformer/gpt2"], "nearest is --case"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and message in done.stderr


def test_an_equal_case_ends_with_0_and_writes_its_result_and_page(tmp_path):
    done = run("--case=transformer/llama-grouped", "--quick", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "equal, worst float64 error" in done.stdout and "layers.1.attention.q_proj" in done.stdout
    (result,) = json.loads((tmp_path / "parity.json").read_text())
    assert result["passed"] and result["case"] == "transformer/llama-grouped"
    assert "layers.1.attention.q_proj" in (tmp_path / "parity.html").read_text()


def test_a_broken_twin_ends_with_1_and_the_module_is_named(tmp_path):
    from jaxbench import process_environment

    environment = os.environ | process_environment.environment(
        "cpu"
    )  # so that the command need not start anew and lose the bug
    command = [sys.executable, "-c", INJECTED.format(workdir=tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "NOT equal" in said and "the cause is in model (input of layers.0" in said
    (result,) = json.loads((tmp_path / "parity.json").read_text())
    assert result["blame"]["module"] == "model" and not result["passed"]
