"""A user's checkpoint against transformers: no false alarm by rounding of norms, and a row longer than its window."""

import numpy as np
import pytest
import torch
import transformers

from jaxbench.parity import own_model
from jaxbench.pretrained import weights

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.3}
NORM = "layers.1.mlp_norm.scale"


def _saved(folder, config, dtype=torch.float32):
    """Write a random model of a type, whose norms and biases are no ones and zeros."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def _compared(folder, change=lambda checkpoint: checkpoint):
    """Hold a folder, changed after it was read, to transformers; return whether it passes and the largest error."""
    checkpoint = change(weights.load_checkpoint(folder))
    found = own_model.against_transformers(own_model.case_of(folder, checkpoint), folder, checkpoint)
    return found["passed"], found["worst"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    about = SIZES | {"pad_token_id": 0, "sliding_window": 9}
    return _saved(tmp_path_factory.mktemp("own") / "gemma", transformers.Gemma2Config(**about))


def test_a_float32_gemma_passes_though_its_norms_have_one_added_in_float32_as_they_are_loaded(gemma):
    loaded = weights.load_checkpoint(gemma).params
    assert all(value.dtype == np.float32 for value in loaded.values())
    passed, worst = _compared(gemma)
    assert passed and worst < 1e-13
    rounded = {name: value for name, value in loaded.items() if name.endswith("norm.scale")}
    wide = own_model.wide_params(gemma, weights.load_checkpoint(gemma))
    errors = {name: np.abs(wide[name] - value.astype(np.float64)).max() for name, value in rounded.items()}
    assert len(errors) == 9 and all(1e-9 < error < 1e-7 for error in errors.values())


def test_a_wrong_norm_still_fails(gemma, monkeypatch):
    def planted(checkpoint):
        wrong = np.nextafter(checkpoint.params[NORM], np.float32(2))  # by its last bit alone
        return checkpoint._replace(params=checkpoint.params | {NORM: wrong})

    passed, worst = _compared(gemma, planted)
    assert not passed and worst > 1e-9
    kept = weights.values_of
    plain = lambda tensors, job, config: kept(tensors, job._replace(rule=job.rule._replace(kind="norm")), config)
    monkeypatch.setattr(weights, "values_of", lambda tensors, job, config: (
        plain if job.rule.kind == "shifted" else kept)(tensors, job, config))  # fmt: skip
    passed, worst = _compared(gemma)
    assert not passed and worst > 0.1


def test_a_window_longer_than_the_rows_is_passed_by_one_row_where_that_is_affordable(tmp_path, monkeypatch):
    folder = _saved(tmp_path / "mistral", transformers.MistralConfig(**SIZES, sliding_window=70))
    passed, worst = _compared(folder)
    assert passed and worst < 1e-13
    wider = lambda checkpoint: checkpoint._replace(config=checkpoint.config.model_copy(update={"sliding_window": 71}))
    assert not _compared(folder, wider)[0]
    checkpoint = weights.load_checkpoint(folder)
    case = own_model.case_of(folder, checkpoint)
    assert own_model.shape_of(case, checkpoint) == (1, 86)
    monkeypatch.setattr(own_model.environment, "available_memory_bytes", lambda: 10**6)
    assert own_model.shape_of(case, checkpoint) == (2, 64)
    for window, wanted in ((None, (2, 64)), (9, (2, 64)), (63, (2, 64)), (120, (2, 64))):
        changed = checkpoint._replace(config=checkpoint.config.model_copy(update={"sliding_window": window}))
        assert own_model.shape_of(case, changed) == wanted
