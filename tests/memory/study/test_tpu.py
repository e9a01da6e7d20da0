"""Decoders with memory, compiled ahead of time for a TPU slice, in a process of its own."""

import json
import os
import subprocess
import sys

import jax
import pytest

from jaxbench.config import TransformerConfig
from jaxbench.measure import chips, tpu_compile
from jaxbench.memory.study import tpu
from tests.structure import ROOT


def test_a_program_that_does_not_fit_is_said_and_the_others_are_compiled(monkeypatch):
    def refuse(lower, topology):
        raise tpu_compile.DoesNotFitError("does not fit: used 40.00G of 15.75G")

    monkeypatch.setattr(tpu_compile, "devices", lambda topology: jax.devices()[:1])
    monkeypatch.setattr(tpu_compile, "compile_program", refuse)
    shape = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    model = TransformerConfig(vocab_size=32, max_seq_len=8, **shape)
    found = list(tpu.compile_programs(model, chips.parse_topology("v5e:1x1"), batch=1, tokens=8))
    assert [row["program"] for row in found] == ["prefill", "decode", "train"]
    assert {row["does_not_fit"] for row in found} == {"does not fit: used 40.00G of 15.75G"}


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
