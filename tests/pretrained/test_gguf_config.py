"""Keys of a GGUF file that may be left out, have an older name or be read over: as llama.cpp has it, or refused."""

from pathlib import Path

import pytest

from jaxbench.config import RotaryScaling
from jaxbench.pretrained import gguf_config, gguf_file

SIZES = {"embedding_length": 32, "attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 64}
SIZES |= {"block_count": 6, "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-6}
SIZES |= {"attention.layer_norm_epsilon": 1e-5}
LINEAR = RotaryScaling(kind="linear", factor=4.0)
FREQS = "rope_freqs.weight"


def _config(arch="llama", tensors=("token_embd.weight",), **settings):
    """Read a file of these settings, whose names have an underscore for each dot and dashes for underscores."""
    given = {name.replace("_", ".").replace("-", "_"): value for name, value in settings.items()}
    metadata = {f"{arch}.{name}": value for name, value in (SIZES | given).items()}
    shapes = {name: gguf_file.TensorInfo((40, 32), 0, 0, 0) for name in tensors}
    return gguf_config.config_from_gguf(
        gguf_file.GgufFile(Path("x.gguf"), metadata | {"general.architecture": arch}, shapes, None)
    )


FACTOR, KIND, EXTRA, OLD = ("rope_scaling_factor", "rope_scaling_type", "rope_scaling_attn-factor", "rope_scale-linear")
WINDOW = "attention_sliding-window"


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, None),
        ({FACTOR: 4.0}, LINEAR),
        ({OLD: 4.0}, LINEAR),
        ({OLD: 8.0, FACTOR: 4.0}, LINEAR),
        ({FACTOR: 4.0, KIND: "none"}, None),
        ({KIND: "linear"}, None),
        ({KIND: "linear", FACTOR: 0.0}, None),
        ({FACTOR: 1.0}, None),
        ({KIND: "yarn"}, RotaryScaling(kind="yarn", factor=1.0, original_max_seq_len=64)),
    ],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_factor_without_a_kind_of_scaling_is_linear_and_none_or_zero_is_one(arch, settings, scaling):
    assert _config(arch, **settings).rope_scaling == scaling


def test_a_window_is_llamas_where_it_is_no_zero_and_read_over_in_families_that_llama_cpp_gives_none():
    assert _config(**{WINDOW: 7}).sliding_window == 7  # a converted Mistral
    assert _config(**{WINDOW: 0}).sliding_window is None
    assert [_config(arch, **{WINDOW: 7}).sliding_window for arch in ("qwen2", "qwen3", "gemma")] == [None] * 3
    assert _config("gemma3", **{WINDOW: 7, "attn-logit-softcapping": 0.0}).sliding_window == 7


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        *((arch, {"attention_causal": False}, f"{arch}.attention.causal=False") for arch in ("llama", "gpt2")),
        ("llama", {EXTRA: 2.0}, "llama.rope.scaling.attn_factor=2.0 is not supported, wanted 1.0"),
        ("llama", {EXTRA: 2.0, KIND: "linear", FACTOR: 4.0}, "llama.rope.scaling.attn_factor=2.0 is not supported"),
        ("llama", {OLD: "x"}, "llama.rope.scaling.factor='x' is no number"),
        ("llama", {KIND: "longrope"}, "llama.rope.scaling.type='longrope' is not supported"),
        ("qwen2", {KIND: "yarn", FACTOR: 4.0, "rope_freq-base": 1.0}, "yarn with rope_theta=1.0 is not supported"),
        ("gemma3", {"attn-logit-softcapping": 2.0, WINDOW: 7}, "attn_logit_softcapping=2.0 is not supported"),
    ],
)
def test_settings_that_are_not_computed_are_refused_in_one_line(arch, settings, message):
    with pytest.raises(ValueError, match=f"^x.gguf: .*{message}"):
        _config(arch, **settings)


@pytest.mark.parametrize("kind", [None, "linear", "yarn"])
def test_llama_3s_divisors_beside_another_scaling_are_refused(kind):
    settings = {FACTOR: 4.0} | ({} if kind is None else {KIND: kind})
    with pytest.raises(ValueError, match=f"^x.gguf: rope_freqs.weight beside llama.rope.scaling.type='{kind or 'li'}"):
        _config(tensors=("token_embd.weight", FREQS), **settings)
