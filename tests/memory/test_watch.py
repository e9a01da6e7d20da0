"""What a training run shows of its banks."""

import functools

import jax
import numpy as np

from jaxbench import initial
from jaxbench import train as jax_train
from jaxbench.memory import bank_config, decoder, decoder_config
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import StepConfig
from jaxbench.training.train_config import TrainConfig
from torch_ref import train
from torch_ref.memory import decoder as torch_decoder
from torch_ref.training import engine

SHAPE = {"d_model": 16, "num_heads": 2, "head_dim": 8}
MEMORY = {"kind": "bank", "layers": [1], "window": 4}
MEMORY |= {"bank": SHAPE | {"block_size": 4, "memory_slots": 4, "ratio": 2}}
DECODER = decoder_config.MemoryTransformerConfig(
    **SHAPE, memory=MEMORY, vocab_size=32, d_ff=16, num_layers=2, num_kv_heads=2, max_seq_len=32
)


def batch(kind, is_token):
    """Return two rows of two documents, in which some slots are padding, as a backend's batch."""
    random, positions = np.random.default_rng(0), np.tile(np.arange(16, dtype=np.int32), (2, 2))
    tokens = random.integers(32, size=(2, 32)).astype(np.int32)
    segments = np.where(is_token, (1 + np.arange(32, dtype=np.int32) // 16)[None], 0)
    return kind(tokens, tokens, np.where(is_token, positions, -1), is_token, segments)


def run(params, how):
    """Return the PyTorch engine of a run."""
    extension = torch_decoder.extension(DECODER.memory)
    model = DECODER.model_dump(exclude={"memory"})
    settings = TrainConfig(model=model, step=how, batch_size=2, steps=1, learning_rate=1e-3, data={"seq_len": 32})
    return engine.Engine(settings, DECODER, params, extension=extension)


def test_the_banks_of_a_decoder_in_training_are_shown_by_layer():
    found = run(initial.initial_params(DECODER, 0), StepConfig()).watched(batch(train.Batch, np.ones((2, 32), bool)))
    # Eight blocks: one is recent, seven were compressed into 14 slots, of which four are left.
    assert (found["bank_1/occupancy"], found["bank_1/evictions"], found["bank_1/compression_ratio"]) == (1.0, 10.0, 2.0)
    assert found["bank_1/age_below_1_blocks"] == found["bank_1/age_below_2_blocks"] == 2.0
    assert sum(value for name, value in found.items() if "/age_" in name) == 4.0
    assert len(found) == 7 + len(bank_config.AGE_EDGES)


def test_both_backends_show_the_same_banks(x64):
    is_token, how = np.ones((2, 32), bool), StepConfig(precision="float64")
    is_token[1, [3, 14, 15, 16, 17, 31]] = False  # 26 tokens: six blocks, and two that wait
    params = initial.initial_params(DECODER, 0, distinct=True)
    state = optimizer_step.init_state(decoder.build(DECODER, params, dtype="float64"), params, how)
    show = jax.jit(functools.partial(decoder.extension(DECODER.memory).watch, graph=state.graph, step_config=how))
    found, twin = show(state.params, batch(jax_train.Batch, is_token)), run(params, how)
    arrays = twin._batch(batch(train.Batch, is_token))
    wanted = twin.extension.watch(twin.state.params, arrays, graph=None, step_config=how)
    assert list(found) == list(wanted) == [1] and wanted[1].count.tolist() == [0, 2]
    for name, value in wanted[1]._asdict().items():
        np.testing.assert_allclose(getattr(found[1], name), value, rtol=1e-12, atol=1e-12, err_msg=name)
    for mine, other in zip(*(bank_config.memory_stats(each[1]) for each in (found, wanted)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)
