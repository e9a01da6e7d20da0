"""Decoders with memory, compiled ahead of time for a TPU slice, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from jaxbench.measure import tpu_compile
from tests.structure import ROOT


@pytest.mark.skipif(bool(tpu_compile.unavailable()), reason=tpu_compile.unavailable() or "-")
def test_prefill_decode_and_training_of_mac_and_bank_fit_a_tpu_chip():
    paths = [f"configs/ltm/{name}.yaml" for name in ("mac", "bank")]
    command = [sys.executable, "-m", "jaxbench.memory.study.tpu", *(f"--config={path}" for path in paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["config"], row["program"]) for row in rows] == [
        (path, name) for path in paths for name in ("prefill", "decode", "train")
    ]
    for row in rows:
        assert row["device"] == "v5e:2x2" and 0 < row["bytes"] < 2**26
        is_training = row["program"] == "train"  # its weights are split over the chips, the others' rows alone
        assert bool(row["collectives"].get("all-gather")) == is_training
