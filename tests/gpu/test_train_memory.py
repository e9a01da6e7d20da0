"""Ways of saving memory, and the largest batch, measured by one_arm's command at a tiny size."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxbench import cli, config
from jaxbench.gpu import train_memory
from jaxbench.measure import records
from jaxbench.training import engine, memory_savings
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT

MIB = 2**20


def measured(folder, workload, memory_mib):
    """Records of the command."""
    path = folder / records.RESULTS_NAME
    command = [sys.executable, "-m", "jaxbench.gpu.one_arm", f"--workload={workload}", "--device=cpu", "--steps=1"]
    command += ["--config=configs/lm/tiny_shape.yaml", f"--memory_mib={memory_mib}", f"--output={path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return records.read_lines(path)


@pytest.mark.parametrize("memory_mib", [64, 1])
def test_a_ladder_has_the_bytes_of_every_form_and_a_rate_of_those_that_fit(tmp_path, memory_mib):
    found = measured(tmp_path, "memory_ladder", memory_mib)
    names = [name for name, *_ in memory_savings.SAVINGS]
    needed = [each for each in found if each.metric == "device_peak_bytes"]
    assert [each.arm for each in needed] == names and all(MIB < each.value < 64 * MIB for each in needed)
    fits = memory_mib == 64
    assert {each.detail["fits"] for each in found} == {fits}
    assert [each.arm for each in found if each.metric == "train_tokens_per_s"] == (names if fits else [])


def test_a_form_that_breaks_is_a_record_and_the_others_follow(monkeypatch):
    def broken_if_dense(run, config, params):
        if run.implementation == "dense":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return SimpleNamespace(memory=lambda: {"live": 0, "step": 2 * MIB})

    monkeypatch.setattr(engine, "Engine", broken_if_dense)
    settings, kept = config.load(ROOT / "configs/lm/tiny_shape.yaml", (), TrainConfig), []
    with pytest.raises(cli.GateFailed, match="1 of 5 could not be measured, the first: naive: RuntimeError"):
        shape = settings.decoder(settings.model.vocab_size)
        train_memory.ladder(settings, shape, None, kept.append, steps=1, device="cpu", limit=MIB)
    assert [each.arm for each in kept] == [name for name, *_ in memory_savings.SAVINGS]
    assert [(each.status, each.value) for each in kept] == [("error", None)] + [("ok", 2 * MIB)] * 4


def test_the_largest_batch_fits_its_limit_and_one_row_more_does_not(tmp_path):
    found = {each.metric: each for each in measured(tmp_path, "largest_batch", 8)}
    largest = found["largest_batch"]
    tried = {int(rows): needed for rows, needed in largest.detail["tried"].items()}
    assert tried[int(largest.value)] <= 8 * MIB < tried[int(largest.value) + 1]
    assert found["train_tokens_per_s"].workload.batch == largest.value and found["train_tokens_per_s"].value > 0
