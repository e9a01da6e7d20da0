"""Settings of Hugging Face and GGUF files become one configuration; what is not supported is refused by name."""

import math
from pathlib import Path

import numpy as np
import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from jaxbench import initial, rotary
from jaxbench.config import RotaryScaling, TransformerConfig
from jaxbench.memory import folder as memory_folder
from jaxbench.pretrained import families, hf_config

SOURCE = Path("folder/config.json")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3 = LLAMA | {"model_type": "qwen3"}
GEMMA2, GEMMA3 = LLAMA | {"model_type": "gemma2"}, LLAMA | {"model_type": "gemma3_text"}
GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3 = RotaryScaling(kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def test_llama_settings_left_out_have_transformers_defaults():
    config = hf_config.config_from_hf(LLAMA, SOURCE)
    theirs = LlamaConfig(**LLAMA)
    assert config.head_dim == theirs.head_dim == 8
    assert config.max_seq_len == theirs.max_position_embeddings
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_embeddings is theirs.tie_word_embeddings is False
    assert (config.num_kv_heads, config.d_ff, config.use_bias, config.sliding_window) == (2, 48, False, None)


def test_qwen3_settings_left_out_have_transformers_defaults():
    values = {key: value for key, value in QWEN3.items() if key != "num_key_value_heads"}
    config, theirs = hf_config.config_from_hf(values | {"num_attention_heads": 64}, SOURCE), Qwen3Config(**values)
    assert (config.qk_norm, config.head_dim, config.num_kv_heads) == (True, theirs.head_dim, theirs.num_key_value_heads)
    assert (config.max_seq_len, config.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (config.tie_embeddings, config.use_bias, config.sliding_window) == (False, False, None)
    windowed = {"use_sliding_window": True, "max_window_layers": 0}
    assert hf_config.config_from_hf(QWEN3 | windowed, SOURCE).sliding_window == 4096
    assert hf_config.config_from_hf(QWEN3 | windowed | {"sliding_window": 9}, SOURCE).sliding_window == 9
    assert hf_config.config_from_hf(QWEN3 | {"sliding_window": 9}, SOURCE).sliding_window is None


def test_qwen2_settings_left_out_have_transformers_defaults():
    values = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": "qwen2"}
    config, theirs = (
        hf_config.config_from_hf(values | {"num_attention_heads": 32, "hidden_size": 64}, SOURCE),
        Qwen2Config(**values),
    )
    assert (config.qkv_bias, config.use_bias, config.qk_norm, config.sliding_window) == (True, False, False, None)
    assert (config.num_kv_heads, config.max_seq_len) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert (config.norm_eps, config.head_dim) == (theirs.rms_norm_eps, 2)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("theirs", [GemmaConfig, Gemma2Config, Gemma3TextConfig], ids=lambda each: each.model_type)
def test_gemma_settings_left_out_have_transformers_defaults(theirs):
    values = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    values |= {"model_type": theirs.model_type, "num_attention_heads": 16, "num_hidden_layers": 12}
    config, theirs = hf_config.config_from_hf(values, SOURCE), theirs(**values)
    assert (config.head_dim, config.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert (config.max_seq_len, config.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (config.tie_embeddings, config.activation, config.embedding_scale) == (True, "geglu", 32**0.5)
    assert config.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert config.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert (config.query_pre_attn_scalar, config.post_norms) == (None, theirs.model_type != "gemma")
    kinds = getattr(theirs, "layer_types", ["full_attention"] * 12)
    assert [config.at_layer(i).sliding_window is None for i in range(12)] == [k == "full_attention" for k in kinds]
    rope = theirs.rope_parameters
    assert config.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert config.local_rope_theta == rope.get("sliding_attention", {}).get("rope_theta")


def test_gpt2_settings_left_out_have_transformers_defaults():
    config, theirs = hf_config.config_from_hf(GPT2, SOURCE), GPT2Config(**GPT2)
    assert config.max_seq_len == theirs.n_positions
    assert config.norm_eps == theirs.layer_norm_epsilon
    assert config.tie_embeddings is True
    assert (config.d_ff, config.head_dim, config.num_kv_heads) == (128, 8, 4)
    assert (config.norm, config.activation, config.position, config.use_bias) == ("layernorm", "gelu", "learned", True)


@pytest.mark.parametrize(
    ("settings", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, 5e5, LLAMA3),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, RotaryScaling(kind="linear", factor=2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}, 5e5, LLAMA3),
    ],
)
def test_both_forms_of_rotary_settings_are_read(settings, theta, scaling):
    config = hf_config.config_from_hf(LLAMA | settings, SOURCE)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 1.1},
        {"factor": None},  # the ratio of the two contexts then
        {"original_max_position_embeddings": None},
    ],
)
def test_yarn_frequencies_and_factor_are_those_of_transformers(more, monkeypatch):
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {key: value for key, value in (YARN | more).items() if value is not None or key == "factor"}
    values = LLAMA | {"head_dim": 64, "max_position_embeddings": 4096, "rope_parameters": given | {"rope_theta": 1e6}}
    config = hf_config.config_from_hf(values, SOURCE)
    theirs = LlamaConfig(**{key: value for key, value in values.items() if key != "rope_parameters"})
    theirs.rope_parameters = dict(values["rope_parameters"])
    for name in ("float", "float32"):  # transformers computes them in float32 by name
        monkeypatch.setattr(torch, name, torch.float64)
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    found = rotary.frequencies(64, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-14)
    assert config.rope_scaling.magnitude == pytest.approx(factor, rel=1e-15)
    assert config.query_scale == pytest.approx(factor**2, rel=1e-15)  # scores have it once of each side


def test_a_window_is_mistrals_and_one_that_a_llama_would_feel_is_refused():
    assert (
        hf_config.config_from_hf(LLAMA | {"sliding_window": 16, "model_type": "mistral"}, SOURCE).sliding_window == 16
    )
    for window in (None, 2048, 4096):  # as long as the context of 2,048: no query feels it
        assert hf_config.config_from_hf(LLAMA | {"sliding_window": window}, SOURCE).sliding_window is None
    with pytest.raises(ValueError, match="sliding_window=16 is not supported in model_type 'llama'"):
        hf_config.config_from_hf(LLAMA | {"sliding_window": 16}, SOURCE)


OTHER_FUNCTIONS = [
    ("attention_multiplier", 0.1), ("attention_multiplier", 1.0), ("residual_multiplier", 0.2),
    ("embedding_multiplier", 12.0), ("logits_scaling", 8.0), ("final_logit_softcapping", 30.0),
    ("num_local_experts", 8), ("num_experts_per_tok", 2), ("clip_qkv", 2.0), ("qk_norm", True), ("use_qk_norm", True),
    ("qk_layernorm", True), ("layer_types", ["sliding_attention", "full_attention"]), ("scale_emb", 12),
    ("scale_embedding", True), ("rope_interleaved", True), ("rotary_pct", 0.25), ("use_mrope", True), ("alibi", True),
    ("use_parallel_residual", True), ("no_rope_layers", [1, 0]), ("attention_sinks", 4), ("moe_layer_freq", [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OTHER_FUNCTIONS)
def test_a_setting_of_another_function_that_no_reader_knows_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"^folder/config.json: {key}=.* is not supported in model_type 'llama'"):
        hf_config.config_from_hf(LLAMA | {key: value}, SOURCE)


@pytest.mark.parametrize("key", [key for key, _ in OTHER_FUNCTIONS])
def test_a_setting_that_is_off_is_read_over(key):
    for value in (None, False):
        assert hf_config.config_from_hf(LLAMA | {key: value}, SOURCE) == hf_config.config_from_hf(LLAMA, SOURCE)


def test_settings_of_published_files_that_change_nothing_are_read_over():
    llama = {"attention_multiplier": 8**-0.5, "residual_multiplier": 1.0, "logits_scaling": 1, "num_experts": 0}
    llama |= {"pretraining_tp": 2, "rope_interleaved": False, "is_llama_config": True, "max_grad_norm": 1.0}
    llama |= {"layer_norm_eps": 1e-5, "layer_types": ["full_attention"] * 2, "router_aux_loss_coef": 0.1}
    llama |= {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "default"}}
    qwen = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21, "use_mrope": False}
    gemma2 = {"sliding_window": 4096, "sliding_window_size": 4096, "cache_implementation": "hybrid"}
    gemma3 = {"_sliding_window_pattern": 6, "sliding_window_pattern": 6, "final_logit_softcapping": None}
    gpt2 = {"n_ctx": 1024, "scale_attn_weights": True, "summary_first_dropout": 0.1, "reorder_and_upcast_attn": False}
    for base, more in (
        (LLAMA, llama), (LLAMA | {"model_type": "qwen2"}, qwen), (QWEN3, qwen), (GEMMA2, gemma2), (GEMMA3, gemma3),
        (GPT2, gpt2), (LLAMA | {"model_type": "mistral"}, {"layer_types": ["sliding_attention"] * 2}),
    ):  # fmt: skip
        assert hf_config.config_from_hf(base | more, SOURCE) == hf_config.config_from_hf(base, SOURCE)


def test_a_decoder_with_memory_names_the_command_that_reads_it():
    with pytest.raises(ValueError, match="decoder with memory, which experiments/serve.py --model=folder reads"):
        hf_config.config_from_hf({"model_type": hf_config.MEMORY, "decoder": {}}, SOURCE)
    assert memory_folder.MODEL_TYPE == hf_config.MEMORY


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (LLAMA | {"model_type": "bert"}, "architecture 'bert' is not supported, wanted one of llama, mistral, gpt2"),
        ({}, "architecture None is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, wanted 'silu'"),
        (LLAMA | {"attention_bias": True}, "attention_bias=True with mlp_bias=False is not supported"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "longrope"}},
            "rope scaling 'longrope' is not supported, wanted default",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "setting 'factor' is missing"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads=0 is no whole number from 1"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size='wide' is no whole number from 1"),
        (LLAMA | {"num_hidden_layers": -1}, "num_layers Input should be greater than 0, got -1"),
        (LLAMA | {"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "setting 'vocab_size' is missing"),
        (QWEN3 | {"attention_bias": True}, "attention_bias=True is not supported, wanted False"),
        (
            QWEN3 | {"use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window=True with max_window_layers=1 is not supported, wanted 0, .* or at least 2",
        ),
        (GEMMA2 | {"layer_types": ["full_attention"] * 2}, "layer_types=.* is not supported, wanted windows in all"),
        (GEMMA2 | {"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported, wanted None"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        (LLAMA | {"model_type": "gemma3"}, "architecture 'gemma3' is not supported, wanted one of .*gemma3_text"),
        (GPT2 | {"activation_function": "relu"}, "activation_function='relu' is not supported"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        (GPT2 | {"n_head": 5}, "n_embd=32 is not a multiple of n_head=5"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line_with_the_files_name(values, message):
    with pytest.raises(ValueError, match=message) as raised:
        hf_config.config_from_hf(values, SOURCE)
    assert str(raised.value).startswith(str(SOURCE))
    assert "\n" not in str(raised.value)


SHAPE = {"vocab_size": 50, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "head_dim": 8, "max_seq_len": 64}
GEMMA_PARTS = {"activation": "geglu", "embedding_scale": 32**0.5, "norm_eps": 1e-6}
WINDOWS = {"post_norms": True, "sliding_window": 7, "global_every": 2}
CONFIGS = {
    "llama": TransformerConfig(**SHAPE, num_kv_heads=2, rope_scaling=LLAMA3, norm_eps=1e-6, tie_embeddings=False),
    "llama with biases": TransformerConfig(**SHAPE, num_kv_heads=4, use_bias=True, rope_theta=5e5),
    "llama stretched": TransformerConfig(
        **SHAPE, num_kv_heads=1, rope_scaling=RotaryScaling(kind="linear", factor=4.0)
    ),
    "mistral": TransformerConfig(**SHAPE, num_kv_heads=2, sliding_window=7),
    "qwen3": TransformerConfig(**SHAPE | {"head_dim": 16}, num_kv_heads=2, qk_norm=True, rope_theta=1e6),
    "qwen3 window": TransformerConfig(**SHAPE, num_kv_heads=4, qk_norm=True, sliding_window=7),
    "qwen2": TransformerConfig(**SHAPE, num_kv_heads=2, qkv_bias=True, rope_theta=1e6),
    "llama yarn": TransformerConfig(**SHAPE, num_kv_heads=2, rope_scaling=RotaryScaling(kind="yarn", factor=4.0)),
    "qwen2 window, yarn": TransformerConfig(
        **SHAPE,
        num_kv_heads=4,
        qkv_bias=True,
        sliding_window=7,
        rope_scaling=RotaryScaling(kind="yarn", factor=2.0, attention_factor=1.5, beta_fast=16.0, truncate=False),
    ),
    "gemma": TransformerConfig(**SHAPE, num_kv_heads=1, **GEMMA_PARTS),
    "gemma2": TransformerConfig(
        **SHAPE,
        num_kv_heads=2,
        **GEMMA_PARTS,
        **WINDOWS,
        query_pre_attn_scalar=16,
        attention_softcap=50.0,
        logit_softcap=30.0,
    ),
    "gemma3": TransformerConfig(
        **SHAPE, num_kv_heads=2, **GEMMA_PARTS, **WINDOWS, qk_norm=True, local_rope_theta=1e4, rope_theta=1e6
    ),
    "gpt2": TransformerConfig(**SHAPE, num_kv_heads=4, **families.GPT2_SHAPE),
}
THEIR_CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config, "gpt2": GPT2Config}
THEIR_CONFIGS |= {"qwen2": Qwen2Config, "gemma": GemmaConfig, "gemma2": Gemma2Config, "gemma3_text": Gemma3TextConfig}


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_survives_config_json_and_transformers(name):
    values = hf_config.config_to_hf(CONFIGS[name])
    assert hf_config.config_from_hf(values, SOURCE) == CONFIGS[name]
    through_theirs = THEIR_CONFIGS[values["model_type"]](**values).to_dict()
    assert hf_config.config_from_hf(through_theirs, SOURCE) == CONFIGS[name]


def test_combination_without_an_architecture_is_refused():
    mixed = TransformerConfig(**SHAPE, num_kv_heads=2, norm="layernorm")
    with pytest.raises(ValueError, match="no Hugging Face architecture has norm=layernorm, activation=swiglu"):
        hf_config.config_to_hf(mixed)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma", {"qk_norm": True}),
        ("gemma", {"embedding_scale": 1.0}),
        ("gemma", {"qkv_bias": True}),
        ("gemma2", {"post_norms": False}),
        ("gemma3", {"qk_norm": False}),
        ("gemma3", {"attention_softcap": 1.0}),
        ("llama", {"logit_softcap": 1.0}),
        ("llama", {"activation": "geglu"}),
        ("qwen2", {"qk_norm": True}),
        ("gpt2", {"qkv_bias": True}),
        ("gemma2", {"query_pre_attn_scalar": 7.5}),  # transformers wants a whole number
        ("gemma2", {"num_heads": 3, "num_kv_heads": 3}),  # transformers wants heads that divide the width
        ("llama", {"num_heads": 3, "num_kv_heads": 3, "use_bias": True}),
    ],
)
def test_parts_of_one_family_in_another_are_refused(name, change):
    with pytest.raises(ValueError, match="no Hugging Face architecture has norm="):
        hf_config.config_to_hf(CONFIGS[name].model_copy(update=change))


@pytest.mark.parametrize(
    ("config", "table"),
    [
        ("llama", families.HF_LLAMA),
        ("llama", families.GGUF_LLAMA),
        ("qwen2", families.HF_LLAMA),
        ("qwen2", families.GGUF_HALVES),
        ("gemma", families.HF_GEMMA),
        ("gemma2", families.HF_GEMMA2),
        ("gemma3", families.HF_GEMMA2),
        ("gemma3", families.GGUF_HALVES),
        ("gpt2", families.HF_GPT2),
        ("gpt2", families.GGUF_GPT2),
    ],
)
def test_every_parameter_has_exactly_one_rule(config, table):
    names = {"embed": ("embedding",), "norm": ("scale", "bias"), "shifted": ("scale", "bias")}
    covered = [
        f"{name.format(i=i)}.{part}"
        for rule in table.rules
        for i in (range(2) if "{i}" in rule.theirs else [0])
        for name in rule.ours
        for part in names.get(rule.kind, ("kernel", "bias"))
    ]
    assert len(covered) == len(set(covered))
    assert set(initial.parameter_shapes(CONFIGS[config])) <= set(covered)


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_are_counted_without_listing_them(config):
    for layers in (1, 3):
        shape = CONFIGS[config].model_copy(update={"num_layers": layers})
        listed = sum(math.prod(each) for each in initial.parameter_shapes(shape).values())
        assert initial.num_parameters(shape) == listed


@pytest.mark.parametrize("value", [0, "8", 8.0, True, [8], {"a": 1}])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads"])
def test_sizes_that_are_no_whole_numbers_are_named(key, value):
    with pytest.raises(ValueError, match=f"config.json: {key}=.* is no whole number from 1"):
        hf_config.config_from_hf(LLAMA | {key: value}, SOURCE)
