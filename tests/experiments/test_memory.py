"""The memory command as a user calls it; what it measures is tested in tests/memory."""

import json
import os
import subprocess
import sys

import pytest

from tests.structure import ROOT


def command(name, *flags):
    line = [sys.executable, str(ROOT / "experiments" / "memory.py"), name, *flags]
    return subprocess.run(line, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=120)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("arms", ["--part=3/2"], "--part=3/2"),
        ("arms", ["--set=task_steps={copy: 5}"], "task_steps has copy: 5, wanted a task of recall, passkey"),
        ("arms", ["--config=configs/memory/books.yaml", "--set=tasks.books.path=gone.txt"], "gone.txt is no file"),
        ("cost", ["--set=lengths=[3000]"], "length 3000 is not a multiple of segment=2048"),
        ("stability", ["--set=depths=[7]"], "less than or equal to 4"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(name, flags, message, tmp_path):
    done = command(name, f"--workdir={tmp_path}", *flags)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_arms_in_two_parts_make_one_report(tmp_path):
    less = {"steps": 2, "task_steps": {}, "batch_size": 2, "seeds": [0], "factors": [1], "test_rows": 8}
    arms = {"plain": {"d_ff": 16}}
    decoder = {"d_model": 16, "num_layers": 1, "num_heads": 1, "head_dim": 16}
    tasks = {"recall": {"task": "recall", "length": 16, "vocab_size": 16, "items": 2, "queries": 2}}
    content = less | {"window": 4, "arms": arms, "decoder": decoder, "tasks": tasks, "learning_rates": [1e-3, 1e-2]}
    path = tmp_path / "arms.json"
    path.write_text(json.dumps(content))
    for part in ("--part=1/2", "--part=2/2", "--part=1/1"):
        done = command("arms", f"--config={path}", f"--workdir={tmp_path}", part)
        assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in tmp_path.glob("runs-*")) == ["runs-1-of-2.jsonl", "runs-2-of-2.jsonl"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [run["learning_rate"] for run in summary["runs"]] == [1e-3, 1e-2]
    assert "right answers in %" in done.stdout and (tmp_path / "report.html").is_file()
