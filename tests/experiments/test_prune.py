"""The pruning command as a shell calls it; what it does is tested in tests/quantization/."""

import json
import os
import subprocess
import sys

from jaxbench.pretrained import weights
from tests.generation import tiny
from tests.structure import ROOT


def call(*words):
    command = [sys.executable, str(ROOT / "experiments" / "prune.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_pruned_and_read_again(tmp_path):
    model, output = tiny.make(tmp_path / "tiny"), tmp_path / "pruned"
    words = ["--method=wanda", "--fraction=0.25", "--scope=matrix", "--seq_len=32", "--batches=1", "--batch_size=2"]
    shown = call("model", f"--model={model}", f"--output={output}", *words)
    assert shown.startswith("wanda: 2,560 of 10,240 weights of 7 matrices are zero (25.0%); nats per token, ")
    assert shown.endswith(f"; written: {output}\n") and len(shown.splitlines()) == 1
    params = weights.load_checkpoint(output).params
    assert (params["layers.0.mlp.up_proj.kernel"] == 0).mean() == 0.25


def test_the_speed_table_has_a_row_an_arm_and_says_what_it_is(tmp_path):
    words = ["--tokens=4", "--length=64", "--d_model=16", "--d_ff=32", "--block_size=16", "--local=1", "--first=0"]
    shown = call("speed", *words, "--rounds=2", "--repeats=1", f"--output={tmp_path / 'speed.json'}")
    lines = shown.splitlines()
    assert [line.split(",")[0] for line in lines[1:-1]] == ["feed-forward"] * 5 + ["attention"] * 3
    assert "their zeros are multiplied" in lines[-1]
    record = json.loads((tmp_path / "speed.json").read_text())
    assert len(record["rows"]) == 8 and record["rounds"] == 2 and record["environment"]["threads"] >= 1
    half = [row for row in record["rows"] if row["arm"].startswith("structured")]
    assert half[0]["flops"] < 0.6 * record["rows"][0]["flops"]
