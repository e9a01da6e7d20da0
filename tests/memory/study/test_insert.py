"""A pretrained model given a memory: its logits are compared with those before, and a memory that speaks up shows."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxbench import config, initial, train
from jaxbench.config import TransformerConfig
from jaxbench.memory.study import insert
from jaxbench.memory.train_config import MemoryTrainConfig
from jaxbench.pretrained import weights
from jaxbench.training import train_inputs

SIZES = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Return a run that gives a tiny exported model a memory in its second layer."""
    model = TransformerConfig(**SIZES, max_seq_len=16)
    folder = weights.save_checkpoint(tmp_path_factory.mktemp("model"), model, initial.initial_params(model, 0))
    neural = {"d_model": 16, "num_heads": 2, "head_dim": 8, "chunk_size": 4}
    return MemoryTrainConfig(
        model=model.model_dump(), memory={"kind": "lmm", "insert": True, "layers": [1], "neural": neural},
        start=str(folder), data={"seq_len": 8}, batch_size=2, steps=1, learning_rate=0.1,
    )  # fmt: skip


def rows():
    tokens = np.random.default_rng(0).integers(32, size=(2, 8)).astype(np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    return train.Batch(tokens, tokens, positions, positions >= 0, np.ones_like(tokens))


def batch(step, batch_size):
    return rows()


def test_a_closed_gate_changes_nothing_and_an_open_one_is_seen(settings, monkeypatch):
    assert insert.change_of_logits(settings, rows()) <= insert.LIMIT
    real = initial.inserted

    def opened(*arguments, **how):
        params = real(*arguments, **how)
        return params | {name: value + 1.0 for name, value in params.items() if name.endswith(".gate")}

    monkeypatch.setattr(initial, "inserted", opened)
    assert insert.change_of_logits(settings, rows()) > 1e-3


@pytest.mark.parametrize(("change", "code"), [(1e-7, 0), (1e-3, 1), (float("nan"), 1)])
def test_the_gate_lets_no_change_pass_that_is_too_large_or_not_a_number(change, code, settings, monkeypatch):
    monkeypatch.setattr(insert.process_environment, "ensure", lambda device: None)
    monkeypatch.setattr(insert.cli, "load_config", lambda model: settings)
    monkeypatch.setattr(
        train_inputs, "prepare_data", lambda settings: SimpleNamespace(train=SimpleNamespace(batch=batch))
    )
    monkeypatch.setattr(insert, "change_of_logits", lambda settings, batch: change)
    if code == 0:
        assert insert.main() == 0
    else:
        with pytest.raises(insert.cli.GateFailed, match=f"the logits change by {change:.2e}"):
            insert.main()


def test_a_run_without_memory_or_without_a_model_to_start_from_is_refused(settings):
    for change in ({"memory": None}, {"start": None}):
        with pytest.raises(ValueError, match="insert: wanted a run with memory and start, got memory"):
            insert.change_of_logits(settings.model_copy(update=change), rows())
    assert config.load("configs/ltm/smollm2.yaml", (), MemoryTrainConfig).step.optimizer.trained == "memory"
