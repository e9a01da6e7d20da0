"""Tensor-parallel decoding in PyTorch, over real processes: against one process, and against the Flax twin."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxbench import initial, sample
from jaxbench.parallel import decoding as flax_decoding
from tests.parallel import decoding_worker as worker
from tests.structure import ROOT

COUNT = 2


def start(count, **changes):
    """Start `count` processes of the worker; return what each printed, and its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = os.environ | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | changes
    command = [sys.executable, "-m", "tests.parallel.decoding_worker", str(count)]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env=here | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(count)
    ]
    return [(*process.communicate(timeout=300), process.returncode) for process in started]


@pytest.fixture(scope="module")
def together():
    """What each of two processes found."""
    ended = start(COUNT)
    assert [code for *_, code in ended] == [0] * COUNT, ended[0][1] + ended[1][1]
    return [json.loads(out) for out, *_ in ended]


@pytest.mark.parametrize("case", worker.CASES)
def test_all_processes_draw_the_tokens_of_one(together, case):
    alone = worker.decoded(case)
    assert [found["tokens"][case] for found in together] == [alone] * COUNT


@pytest.mark.parametrize("bits", worker.PACKED)
def test_packed_weights_decode_the_tokens_of_one_process(together, bits):
    alone = worker.decoded_packed(bits)
    assert [found["packed"][bits] for found in together] == [alone] * COUNT


@pytest.mark.parametrize("case", ["llama, drawn", "gpt2, biases", "gemma's parts"])
def test_processes_of_pytorch_draw_the_tokens_of_jax_s_devices(together, case):
    name, rows, sampling = worker.CASES[case]
    config = worker.CONFIGS[name]
    with jax.enable_x64(True):
        params = initial.initial_params(config, 0, distinct=True)
        model = flax_decoding.build(config, params, flax_decoding.attached("cpu", COUNT), dtype="float64")
        generator = flax_decoding.Generator(model, eos_id=None, sampling=sample.SamplingParams(**sampling))
        assert together[0]["tokens"][case] == worker.tokens_of(generator, rows)


def test_a_process_holds_half_of_every_matrix(together):
    sizes = {name: x.size for name, x in initial.initial_params(worker.CONFIG, 0).items()}
    for found in together:
        held = {name: int(np.prod(shape)) for name, shape in found["shapes"].items()}
        assert held == {name: size // COUNT if is_matrix(name) else size for name, size in sizes.items()}


def is_matrix(name):
    return name.endswith((".kernel", ".embedding"))


def test_a_step_sums_twice_a_layer_and_for_the_logits_and_gathers_the_embedding(together):
    tied = worker.CONFIG.tie_embeddings
    expected = {"all_reduce": 2 * worker.CONFIG.num_layers + tied, "all_gather": 1 + (not tied)}
    assert [found["sums"] for found in together] == [expected] * COUNT


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("whole", "none of the decoder's 3 layers is summed over processes; call decoding.split first"),
        ("heads", "num_kv_heads=3 over 2 devices; wanted a divisor"),
        ("groups", "layers.0.mlp.down_proj has 96 inputs in groups of 32, 2 in a byte, over 2 devices"),
        ("compiled", "torch_compile='step', split already: False"),
        ("twice", "torch_compile='', split already: True"),
        ("count", "--tensor_parallel=5: there are 2 processes (WORLD_SIZE), wanted 5"),
        ("name", "parameters without a rule: ['layers.0.memory.kernel']"),
    ],
)
def test_what_cannot_be_split_is_refused(together, name, words):
    assert words in together[0]["refusals"][name]


def test_a_process_that_was_not_started_with_others_is_refused(monkeypatch):
    from torch_ref.parallel import decoding

    for name in decoding.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start 2 processes by"):
        decoding.attached("cpu", 2)
    with pytest.raises(ValueError, match="--tensor_parallel=64: PyTorch sees 0 devices of the kind gpu"):
        decoding.attached("gpu", 64)
