"""Every stage at a tiny size on the CPU: under this JAX, and under the others that a GPU machine may have."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxbench import config
from jaxbench.gpu import run
from jaxbench.gpu.stages import Stages
from jaxbench.measure.records import RecordFile
from tests.structure import ROOT

STAGES = [stage.name for stage in config.load(ROOT / "configs/gpu/stages.yaml", (), Stages).stages]
NO_PYTHON = 77  # exit code of .ci/gpu_rehearsal
WITHOUT_TORCH = {
    "one_train", "one_decode_1b", "one_decode_135m", "one_decode_graph", "rates", "one_train_float8", "marked",
    "one_train_cublas", "rates_other",
    "ladder", "proof_packed", "memory_titans", "serving", "serving_http", "compression", "features",
    "detection", "attention_rates", "ladder_wide", "train_1b_memory", "train_1b_largest",
}  # fmt: skip


def ended(folder) -> dict[str, str]:
    """Stage -> how it ended."""
    read = RecordFile(folder / "results.jsonl").read()
    return {record.arm: record.status for record in read if record.metric == run.STAGE}


@pytest.mark.timeout(2500)
def test_every_stage_is_rehearsed_and_gives_figures(tmp_path):
    command = [
        sys.executable,
        "experiments/gpu.py",
        "--rehearse",
        "--budget_s=2400",
        f"--workdir={tmp_path / 'results'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + (tmp_path / "results/log.txt").read_text()[-3000:]
    assert ended(tmp_path / "results") == dict.fromkeys(STAGES, "ok")
    rows = run.figures(RecordFile(tmp_path / "results/results.jsonl").read())
    assert {row["stage"] for row in rows} == set(STAGES) and all(
        float(row["value"]) >= 0 for row in rows if row["figure"] != "watermark_overhead"
    )
    rungs = {row["arm"]: float(row["value"]) for row in rows if row["figure"] == "weights_bytes"}
    sizes = [rungs[f"flax {form}"] for form in (
        "float32 dense float", "bfloat16 dense float", "bfloat16 dense int8 xla", "bfloat16 dense int4 xla",
    )]  # fmt: skip
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    split = {form: rungs[f"flax bfloat16 dense {form} tensor=2"] for form in ("float", "int8 xla", "int4 xla")}
    assert split == {form: rungs[f"flax bfloat16 dense {form}"] for form in split}


@pytest.mark.timeout(600)
def test_long_trainings_are_rehearsed_and_give_back_their_losses(tmp_path):
    command = [sys.executable, "experiments/gpu.py", "--config=configs/gpu/long.yaml", "--rehearse", "--budget_s=500"]
    command += [f"--workdir={tmp_path / 'results'}", "--stage=memory_plain,memory_gate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + (tmp_path / "results/log.txt").read_text()[-3000:]
    assert ended(tmp_path / "results") == {"memory_plain": "ok", "memory_gate": "ok"}
    rows = run.figures(RecordFile(tmp_path / "results/results.jsonl").read())
    assert {row["figure"] for row in rows} >= {"train_tokens_per_s", "train_validation_loss"}
    for name in ("memory_plain", "memory_gate"):
        assert len((tmp_path / f"results/{name}-records.jsonl").read_text().splitlines()) >= 1


@pytest.mark.timeout(2500)
@pytest.mark.parametrize("version", ["jax==0.11.2", "jax>=0.12"])
def test_the_stages_without_torch_are_rehearsed_under_other_versions_of_jax(version, tmp_path):
    settings = {**os.environ, "PYTHONWARNINGS": "default"}
    del settings["PIP_NO_INDEX"]  # the environment is made here, where it is not in the cache
    command = [ROOT / ".ci/gpu_rehearsal", version, tmp_path / "results", "--budget_s=2400"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=settings)
    if done.returncode == NO_PYTHON:
        pytest.skip("there is no Python 3.12 here, which newer versions of JAX need")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert f"jax {version[5:9]}" in done.stdout
    found = ended(tmp_path / "results")
    assert {name for name, status in found.items() if status == "ok"} == WITHOUT_TORCH
    assert {status for name, status in found.items() if name not in WITHOUT_TORCH} == {"skipped"}
