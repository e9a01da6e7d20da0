"""Memory of a PyTorch run with a batch: traced, and what PyTorch's allocator gave when it was run."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from jaxbench import initial
from jaxbench.memory.train_config import MemoryTrainConfig
from jaxbench.parity import cases
from tests.structure import ROOT
from torch_ref.memory import decoder
from torch_ref.training import batch_size, engine

LLAMA = cases.LLAMA.model_dump() | {"num_layers": 1, "dropout": 0.0}
FLOAT16 = {"precision": "float16", "optimizer": {"kind": "sgd", "momentum": 0.9}}
BANK = {
    "kind": "bank", "layers": [0], "window": 8,
    "bank": {
        "d_model": 32, "num_heads": 4, "head_dim": 8, "block_size": 4, "memory_slots": 8, "recent_blocks": 2, "ratio": 2
    },
}  # fmt: skip


def run_of(rows, **changed):
    return MemoryTrainConfig(
        **{"model": LLAMA, "steps": 1, "learning_rate": 1e-3, "batch_size": rows, "data": {"seq_len": 32}, **changed}
    )


def allocated(run, config, extension):
    """Highest number of bytes that PyTorch's allocator had given out at once, by its profiler."""
    shape = (run.batch_size, run.data.seq_len)
    params = {name: np.full(size, 0.01, np.float32) for name, size in initial.parameter_shapes(config).items()}
    ids = np.zeros(shape, np.int32)
    batch = (ids, ids, ids, np.ones(shape, bool), ids)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        started = engine.Engine(run, config, params, extension=extension)
        started.step(batch, 1e-3)
        started.evaluate(batch)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]))


@pytest.mark.parametrize(
    "changed",
    [
        {"step": {"precision": "bfloat16"}},
        {"step": {"accumulation": 4, "remat": {"policy": "block"}, "clip_norm": 1.0}},
        {"step": FLOAT16, "model": LLAMA | {"dropout": 0.1}, "data": {"seq_len": 32, "document_mask": True}},
        {"memory": BANK},
    ],
    ids=["bfloat16", "remat", "float16", "bank"],
)
def test_traced_bytes_are_those_that_the_allocator_gives_a_real_run(changed):
    run = run_of(16, **changed)
    config, extension = run.decoder(None), decoder.extension(run.memory)
    traced = batch_size.run_bytes(run, config, extension=extension) / batch_size.HELD
    assert traced == pytest.approx(allocated(run, config, extension), rel=0.02)


def test_a_batch_that_no_machine_holds_is_counted_without_being_made():
    run = run_of(2**19)
    few, many = (batch_size.run_bytes(run_of(rows), run.decoder(None)) for rows in (2**9, 2**19))
    assert many > 2**36 and many == pytest.approx(2**10 * few, rel=0.1)


REAL = """
import numpy as np
from jaxbench import initial
from jaxbench.measure import worker
from tests.training.test_batch_size_torch import LLAMA, run_of
from torch_ref.training import batch_size, engine
policy = {"remat": {"policy": "block"}}
run = run_of(128, data={"seq_len": 64}, step=policy)
config = run.decoder(None)
params = initial.initial_params(config, seed=0)
ids = np.zeros((128, 64), np.int32)
batch = (ids, ids, ids, np.ones(ids.shape, bool), ids)
small = tuple(x[:1] for x in batch)
first = run_of(1, data={"seq_len": 64}, step=policy)
engine.Engine(first, config, params).step(small, 1e-3)  # the libraries' own memory
counted = batch_size.run_bytes(run, config)
worker.release_memory(), worker.reset_peak()
before, started = worker.resident_bytes(), engine.Engine(run, config, params)
for _ in range(3):
    started.step(batch, 1e-3)
print(counted / batch_size.HELD, worker.peak_bytes() - before, counted)
"""


def test_a_process_that_trains_stays_within_the_counted_bytes():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    used, grown, counted = map(float, done.stdout.split())
    assert 0.9 * used < grown <= counted, done.stdout
