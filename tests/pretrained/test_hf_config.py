"""Settings of config.json said twice, left out or null: read as transformers reads them, or refused."""

import copy

import numpy as np
import pytest
import torch
from transformers import GPT2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxbench import rotary
from jaxbench.pretrained import hf_config
from tests.pretrained.test_families import GEMMA2, GEMMA3, GPT2, LLAMA, QWEN3, SOURCE

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN, CONTEXT = {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings"
DEFAULT, LINEAR = {"rope_type": "default"}, {"rope_type": "linear", "factor": 3.0}
MISTRAL, QWEN2, GEMMA = (LLAMA | {"model_type": kind} for kind in ("mistral", "qwen2", "gemma"))
WIDE = {"full_attention": DEFAULT | {"rope_theta": 5e5}, "sliding_attention": DEFAULT | {"rope_theta": 1e4}}


def _theirs(values, monkeypatch):
    """Frequencies of transformers' layers that see everything, and its factor of cosine and sine, in float64."""
    given = copy.deepcopy({key: value for key, value in values.items() if key != "model_type"})  # it writes into them
    config = CONFIG_MAPPING[values["model_type"]](**given)
    layer = "full_attention" if values["model_type"] == "gemma3_text" else None
    rope = config.rope_parameters[layer] if layer else config.rope_parameters
    if rope["rope_type"] == "default":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return rope["rope_theta"] ** -(np.arange(0, width, 2) / width), 1.0
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", layer_type=layer)
    return frequencies.numpy(), factor


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (LLAMA, {"rope_parameters": DEFAULT | {"rope_theta": 5e5}, "rope_scaling": YARN | {CONTEXT: 512}}),
        (LLAMA, {"rope_parameters": LINEAR | {"rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": 1e6}),
        (LLAMA, {"rope_parameters": YARN | {CONTEXT: 512}, "rope_scaling": None}),
        (GEMMA, {"rope_parameters": DEFAULT, "rope_scaling": LINEAR}),
        (GEMMA3, {"rope_parameters": WIDE, "rope_scaling": LINEAR | {"rope_theta": 77.0}}),
        (GEMMA3, {"rope_theta": 5e5, "rope_scaling": LINEAR}),
        (GEMMA3, {"rope_parameters": WIDE | {"full_attention": YARN}, CONTEXT: 16}),  # there it is not looked at
        (LLAMA, {"rope_parameters": YARN, CONTEXT: 64}),
        (LLAMA, {"rope_parameters": YARN | {CONTEXT: 512}, CONTEXT: 64}),
        (LLAMA, {"rope_parameters": LLAMA3 | {CONTEXT: 512}, CONTEXT: 64}),
        (LLAMA, {"rope_parameters": LLAMA3}),
        *((LLAMA, {"rope_parameters": YARN | {CONTEXT: 16, "truncate": each}}) for each in (None, False, True)),
        *((each, {"rope_parameters": YARN}) for each in (MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3)),
        *((each, {"rope_parameters": YARN | {"factor": None, CONTEXT: 512}}) for each in (MISTRAL, QWEN2, QWEN3)),
    ],
)
def test_rotary_settings_in_two_places_or_left_out_give_transformers_frequencies(values, settings, monkeypatch):
    more = {
        "head_dim": 64,
        "num_hidden_layers": 6,
    }  # wide heads feel the context of yarn; Gemma 3 has a layer of each kind
    values = values | more | settings
    config = hf_config.config_from_hf(values, SOURCE)
    wanted, factor = _theirs(values, monkeypatch)
    found = rotary.frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(found, wanted, rtol=1e-14)
    assert (config.rope_scaling.magnitude if config.rope_scaling else 1.0) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"])
def test_contexts_and_key_heads_left_out_are_transformers_and_null_heads_are_as_many_as_queries(kind):
    values = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": kind}
    values |= {"num_attention_heads": 32, "hidden_size": 64}
    config, theirs = hf_config.config_from_hf(values, SOURCE), CONFIG_MAPPING[kind](**values)
    assert (config.num_kv_heads, config.max_seq_len) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert hf_config.config_from_hf(values | {"num_key_value_heads": None}, SOURCE).num_kv_heads == 32


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"max_window_layers": 28}, None),
        ({"max_window_layers": 2}, None),
        ({"max_window_layers": 0}, 9),
        ({"layer_types": ["sliding_attention"] * 2}, 9),
        ({"layer_types": ["full_attention"] * 2, "max_window_layers": 0}, None),
        ({"sliding_window": None, "max_window_layers": 0}, None),
    ],
)
def test_qwens_window_is_in_all_layers_or_in_none_as_its_layer_types_or_first_layer_say(settings, window):
    values = QWEN3 | {"use_sliding_window": True, "sliding_window": 9} | settings
    theirs = CONFIG_MAPPING["qwen3"](**{key: value for key, value in values.items() if key != "model_type"})
    assert theirs.layer_types == ["full_attention" if window is None else "sliding_attention"] * 2
    assert hf_config.config_from_hf(values, SOURCE).sliding_window == window


def test_gpt2s_other_names_are_read_and_beat_its_own_as_in_transformers():
    other = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 99}
    alone = {"model_type": "gpt2", "vocab_size": 50} | other
    for values in (alone, GPT2 | other):
        config, theirs = hf_config.config_from_hf(values, SOURCE), GPT2Config(**values)
        assert (config.d_model, config.num_layers) == (theirs.n_embd, theirs.n_layer) == (64, 3)
        assert (config.num_heads, config.max_seq_len) == (theirs.n_head, theirs.n_positions) == (2, 99)


TYPE = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *((each | {"is_causal": False}, "is_causal=False is not supported, wanted True") for each in (LLAMA, GPT2)),
        (LLAMA | {"is_causal": None}, "is_causal=None is not supported, wanted True"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported, wanted 'gelu_pytorch"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported, wanted 'gelu_pytorch"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": TYPE}}, "rope_type='linear' is not supported"),
        (GEMMA3 | {"rope_scaling": TYPE}, "rope_scaling has type='linear', wanted it under the name rope_type"),
        (GEMMA3 | {"sliding_window": None}, "global_every=6 needs a sliding_window, got None"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0 and high_freq_factor=4"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"low_freq_factor": 5.0}}, "low_freq_factor=5.0 and high_freq_factor=4"),
        (LLAMA | {"rope_parameters": YARN | {"rope_theta": 1}}, "yarn with rope_theta=1.0 is not supported, wanted mo"),
        (
            QWEN3 | {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"]},
            "layer_types=.'full_attention'. with sliding_window=4096 is not supported, wanted .* for each of 2 layers",
        ),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 2}, "with sliding_window=None .*wanted 'full_attention' for"),
    ],
)
def test_settings_that_are_neither_read_nor_neutral_are_refused_in_one_line(values, message):
    with pytest.raises(ValueError, match=f"^{SOURCE}: .*{message}") as raised:
        hf_config.config_from_hf(values, SOURCE)
    assert "\n" not in str(raised.value)


def test_gemma_1_alone_takes_gelu_for_its_approximation():
    assert hf_config.config_from_hf(GEMMA | {"hidden_act": "gelu"}, SOURCE).activation == "geglu"
