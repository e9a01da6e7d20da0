"""What a training run shows of its banks."""

import numpy as np

from jaxbench import observe
from jaxbench.memory import bank_config, decoder_config
from jaxbench.step_config import StepConfig
from torch_ref import engine, train

SHAPE = {"d_model": 16, "num_heads": 2, "head_dim": 8}


def test_the_banks_of_a_decoder_in_training_are_shown_by_layer():
    memory = {
        "kind": "bank",
        "layers": [1],
        "window": 4,
        "bank": SHAPE | {"block_size": 4, "memory_slots": 4, "ratio": 2},
    }
    config = decoder_config.MemoryTransformerConfig(
        **SHAPE, memory=memory, vocab_size=32, d_ff=16, num_layers=2, num_kv_heads=2, max_seq_len=32
    )
    params = decoder_config.initial_params(config, 0)
    run = engine.Engine(config, params, StepConfig(), batch_size=2, seq_len=32, seed=0)
    random, positions = np.random.default_rng(0), np.tile(np.arange(16), (2, 2))  # rows of two documents
    tokens = random.integers(32, size=(2, 32))
    batch = train.Batch(tokens, tokens, positions, np.ones((2, 32), bool), 1 + (np.arange(32) // 16)[None].repeat(2, 0))
    states = run.banks(batch)
    assert list(states) == [1] and states[1].num_slots.tolist() == [4, 4]
    found = observe.bank_scalars(1, bank_config.memory_stats(states[1]))
    # Eight blocks: one is recent, seven were compressed into 14 slots, of which four are left.
    assert (found["bank_1/occupancy"], found["bank_1/evictions"], found["bank_1/compression_ratio"]) == (1.0, 10.0, 2.0)
    assert found["bank_1/age_below_1_blocks"] == found["bank_1/age_below_2_blocks"] == 2.0
    assert sum(value for name, value in found.items() if "/age_" in name) == 4.0
    assert len(found) == 7 + len(bank_config.AGE_EDGES)
