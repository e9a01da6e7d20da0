"""Model families as tables: how Hugging Face and GGUF files name parameters and settings (S file).

A rule maps one module of a file to one or several of ours; `{i}` is the layer. The kind says how values are stored:
  embed        (rows, D), as ours
  norm         scale and bias vectors, as ours
  linear       (out, in), ours transposed
  conv1d       (in, out), as ours; GPT-2's Conv1D
  interleaved  (out, in) with rotary pairs side by side in each head, as llama.cpp stores query and key kernels;
               ours keeps the two halves of each head apart (rotate-half)
Where a rule names several of ours, their outputs are concatenated in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic

from jaxbench import rotary
from jaxbench.config import RotaryScaling, TransformerConfig, shown
from jaxbench.pretrained import gguf_file


class Rule(NamedTuple):
    """One row of a table: module name in the file, our module names, how values are stored."""

    theirs: str
    ours: tuple[str, ...]
    kind: Literal["embed", "norm", "linear", "conv1d", "interleaved"]


class Family(NamedTuple):
    """How one kind of file stores one family."""

    rules: tuple[Rule, ...]
    prefix: str = ""  # some files leave this out in front of every name but the head's
    ignored: str = r"$^"  # regular expression: buffers that carry no parameter


_ATTENTION = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_QKV = tuple(f"layers.{{i}}.{name}" for name in _ATTENTION)

HF_LLAMA = Family(
    rules=(
        Rule("model.embed_tokens", ("embed",), "embed"),
        Rule("model.layers.{i}.input_layernorm", ("layers.{i}.attention_norm",), "norm"),
        Rule("model.layers.{i}.self_attn.q_proj", ("layers.{i}.attention.q_proj",), "linear"),
        Rule("model.layers.{i}.self_attn.k_proj", ("layers.{i}.attention.k_proj",), "linear"),
        Rule("model.layers.{i}.self_attn.v_proj", ("layers.{i}.attention.v_proj",), "linear"),
        Rule("model.layers.{i}.self_attn.q_norm", ("layers.{i}.attention.q_norm",), "norm"),  # Qwen3
        Rule("model.layers.{i}.self_attn.k_norm", ("layers.{i}.attention.k_norm",), "norm"),
        Rule("model.layers.{i}.self_attn.o_proj", ("layers.{i}.attention.o_proj",), "linear"),
        Rule("model.layers.{i}.post_attention_layernorm", ("layers.{i}.mlp_norm",), "norm"),
        Rule("model.layers.{i}.mlp.gate_proj", ("layers.{i}.mlp.gate_proj",), "linear"),
        Rule("model.layers.{i}.mlp.up_proj", ("layers.{i}.mlp.up_proj",), "linear"),
        Rule("model.layers.{i}.mlp.down_proj", ("layers.{i}.mlp.down_proj",), "linear"),
        Rule("model.norm", ("final_norm",), "norm"),
        Rule("lm_head", ("head",), "linear"),
    ),
    prefix="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
HF_GPT2 = Family(
    rules=(
        Rule("transformer.wte", ("embed",), "embed"),
        Rule("transformer.wpe", ("position",), "embed"),
        Rule("transformer.h.{i}.ln_1", ("layers.{i}.attention_norm",), "norm"),
        Rule("transformer.h.{i}.attn.c_attn", _QKV, "conv1d"),
        Rule("transformer.h.{i}.attn.c_proj", ("layers.{i}.attention.o_proj",), "conv1d"),
        Rule("transformer.h.{i}.ln_2", ("layers.{i}.mlp_norm",), "norm"),
        Rule("transformer.h.{i}.mlp.c_fc", ("layers.{i}.mlp.up_proj",), "conv1d"),
        Rule("transformer.h.{i}.mlp.c_proj", ("layers.{i}.mlp.down_proj",), "conv1d"),
        Rule("transformer.ln_f", ("final_norm",), "norm"),
        Rule("lm_head", ("head",), "linear"),
    ),
    prefix="transformer.",
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
)
GGUF_LLAMA = Family(
    rules=(
        Rule("token_embd", ("embed",), "embed"),
        Rule("blk.{i}.attn_norm", ("layers.{i}.attention_norm",), "norm"),
        Rule("blk.{i}.attn_q", ("layers.{i}.attention.q_proj",), "interleaved"),
        Rule("blk.{i}.attn_k", ("layers.{i}.attention.k_proj",), "interleaved"),
        Rule("blk.{i}.attn_v", ("layers.{i}.attention.v_proj",), "linear"),
        Rule("blk.{i}.attn_output", ("layers.{i}.attention.o_proj",), "linear"),
        Rule("blk.{i}.ffn_norm", ("layers.{i}.mlp_norm",), "norm"),
        Rule("blk.{i}.ffn_gate", ("layers.{i}.mlp.gate_proj",), "linear"),
        Rule("blk.{i}.ffn_up", ("layers.{i}.mlp.up_proj",), "linear"),
        Rule("blk.{i}.ffn_down", ("layers.{i}.mlp.down_proj",), "linear"),
        Rule("output_norm", ("final_norm",), "norm"),
        Rule("output", ("head",), "linear"),
    ),
    ignored=r"rope_freqs\.weight",  # read as the configuration's rope_scaling
)
GGUF_QWEN3 = GGUF_LLAMA._replace(  # llama.cpp rotates its halves of heads, as ours
    rules=(
        *(rule._replace(kind="linear") if rule.kind == "interleaved" else rule for rule in GGUF_LLAMA.rules),
        Rule("blk.{i}.attn_q_norm", ("layers.{i}.attention.q_norm",), "norm"),
        Rule("blk.{i}.attn_k_norm", ("layers.{i}.attention.k_norm",), "norm"),
    )
)
GGUF_GPT2 = Family(
    rules=(
        Rule("token_embd", ("embed",), "embed"),
        Rule("position_embd", ("position",), "embed"),
        Rule("blk.{i}.attn_norm", ("layers.{i}.attention_norm",), "norm"),
        Rule("blk.{i}.attn_qkv", _QKV, "linear"),
        Rule("blk.{i}.attn_output", ("layers.{i}.attention.o_proj",), "linear"),
        Rule("blk.{i}.ffn_norm", ("layers.{i}.mlp_norm",), "norm"),
        Rule("blk.{i}.ffn_up", ("layers.{i}.mlp.up_proj",), "linear"),
        Rule("blk.{i}.ffn_down", ("layers.{i}.mlp.down_proj",), "linear"),
        Rule("output_norm", ("final_norm",), "norm"),
        Rule("output", ("head",), "linear"),
    ),
)
HF_FAMILIES = {"llama": HF_LLAMA, "mistral": HF_LLAMA, "gpt2": HF_GPT2, "qwen3": HF_LLAMA}
GGUF_FAMILIES = {"llama": GGUF_LLAMA, "gpt2": GGUF_GPT2, "qwen3": GGUF_QWEN3}
GPT2_SHAPE = {"norm": "layernorm", "activation": "gelu", "position": "learned", "qk_norm": False, "use_bias": True}


class _Settings:
    """The settings of one file; a missing or unsupported one is an error that names the file."""

    def __init__(self, values: dict[str, Any], source: Path, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix

    def need(self, key: str) -> Any:
        if self.values.get(self.prefix + key) is None:
            raise ValueError(f"{self.source}: the setting {self.prefix + key!r} is missing")
        return self.values[self.prefix + key]

    def count(self, key: str) -> int:
        """Setting that is a whole number from 1."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.source}: {self.prefix + key}={shown(value)} is no whole number from 1")
        return value

    def number(self, key: str, *default: Any) -> float:
        """Float32 setting, as the shortest decimal that rounds to it."""
        value = self.get(key, *default) if default else self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.source}: {self.prefix + key}={shown(value)} is no number")
        return _shortest(value)

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def only(self, key: str, default: Any, *supported: Any) -> None:
        value = self.get(key, default)
        if value not in supported:
            wanted = " or ".join(map(repr, supported))
            raise ValueError(f"{self.source}: {self.prefix + key}={shown(value)} is not supported, wanted {wanted}")


def config_from_hf(values: dict[str, Any], source: Path) -> TransformerConfig:
    """Translate a Hugging Face config.json. Its dropout rates are a training recipe and are left out.

    Raises:
      ValueError: an unsupported architecture or setting, or a missing one.
    """
    s = _Settings(values, source)
    model_type = s.get("model_type", None)
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        wanted = ", ".join(HF_FAMILIES)
        raise ValueError(f"{source}: architecture {shown(model_type)} is not supported, wanted one of {wanted}")
    return _build({"gpt2": _gpt2_from_hf, "qwen3": _qwen3_from_hf}.get(model_type, _llama_from_hf), s)


def _gpt2_from_hf(s: _Settings) -> dict[str, Any]:
    s.only("activation_function", "gelu_new", "gelu_new", "gelu_pytorch_tanh")
    s.only("scale_attn_weights", True, True)
    s.only("scale_attn_by_inverse_layer_idx", False, False)
    s.only("add_cross_attention", False, False)
    d_model, heads = s.count("n_embd"), s.count("n_head")
    if d_model % heads:
        raise ValueError(f"{s.source}: n_embd={d_model} is not a multiple of n_head={heads}")
    return GPT2_SHAPE | {
        "vocab_size": s.need("vocab_size"),
        "d_model": d_model,
        "d_ff": s.get("n_inner", 4 * d_model),
        "num_layers": s.need("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": d_model // heads,
        "max_seq_len": s.get("n_positions", 1024),
        "norm_eps": s.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": s.get("tie_word_embeddings", True),
    }


def _llama_from_hf(s: _Settings) -> dict[str, Any]:
    s.only("hidden_act", "silu", "silu")
    attention_bias, mlp_bias = s.get("attention_bias", False), s.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        raise ValueError(
            f"{s.source}: attention_bias={attention_bias} with mlp_bias={mlp_bias} is not supported, wanted them equal"
        )
    d_model, heads = s.count("hidden_size"), s.count("num_attention_heads")
    theta, scaling = _rotary_from_hf(s)
    return {
        "vocab_size": s.need("vocab_size"),
        "d_model": d_model,
        "d_ff": s.need("intermediate_size"),
        "num_layers": s.need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": s.get("num_key_value_heads", heads),
        "head_dim": s.get("head_dim", d_model // heads),
        "max_seq_len": s.get("max_position_embeddings", 2048),
        "norm_eps": s.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "use_bias": attention_bias,
        "tie_embeddings": s.get("tie_word_embeddings", False),
        "sliding_window": s.values.get("sliding_window", 4096) if s.need("model_type") == "mistral" else None,
    }


def _qwen3_from_hf(s: _Settings) -> dict[str, Any]:
    s.only("attention_bias", False, False)
    window = s.values.get("sliding_window", 4096) if s.get("use_sliding_window", False) else None
    kinds, first = set(s.get("layer_types", ["sliding_attention"])), s.get("max_window_layers", 28)
    if window is not None and (kinds != {"sliding_attention"} or first != 0):
        raise ValueError(
            f"{s.source}: use_sliding_window=True with max_window_layers={shown(first)} is not supported, wanted 0, "
            "a window in every layer"
        )
    own = {"num_kv_heads": s.get("num_key_value_heads", 32), "head_dim": s.get("head_dim", 128), "use_bias": False}
    own |= {"max_seq_len": s.get("max_position_embeddings", 32768), "qk_norm": True, "sliding_window": window}
    return _llama_from_hf(s) | own


def _rotary_from_hf(s: _Settings) -> tuple[float, RotaryScaling | None]:
    """Read either form: transformers 5 `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    values = s.get("rope_parameters", None) or s.get("rope_scaling", {})
    rope = _Settings(values, s.source)
    rope.only("partial_rotary_factor", s.get("partial_rotary_factor", 1.0), 1.0)
    theta = rope.get("rope_theta", s.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RotaryScaling(kind="linear", factor=rope.need("factor"))
    if kind != "llama3":
        raise ValueError(f"{s.source}: rope scaling {kind!r} is not supported, wanted default, linear or llama3")
    keys = {name: rope.need(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return theta, RotaryScaling(
        kind="llama3", original_max_seq_len=rope.need("original_max_position_embeddings"), **keys
    )


def config_from_gguf(file: gguf_file.GgufFile) -> TransformerConfig:
    """Translate a GGUF file's metadata; biases, tying and llama3 scaling show in which tensors there are.

    Raises:
      ValueError: an unsupported architecture or setting, or a missing one.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in GGUF_FAMILIES:
        wanted = ", ".join(GGUF_FAMILIES)
        raise ValueError(f"{file.path}: architecture {shown(arch)} is not supported, wanted one of {wanted}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: missing tensor token_embd.weight")
    s = _Settings(file.metadata, file.path, f"{arch}.")
    return _build(lambda s: _from_gguf(s, file, arch), s)


def _build(read: Callable[[_Settings], dict[str, Any]], s: _Settings) -> TransformerConfig:
    """Make the configuration; whatever is wrong with a setting becomes one line that names the file."""
    try:
        return TransformerConfig(**read(s))
    except pydantic.ValidationError as error:
        parts = [".".join(map(str, e["loc"])) + " " + e["msg"] + f", got {shown(e['input'])}" for e in error.errors()]
        raise ValueError(f"{s.source}: {'; '.join(parts)}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{s.source}: a setting has the wrong type or is zero ({error})") from error


def _from_gguf(s: _Settings, file: gguf_file.GgufFile, arch: str) -> dict[str, Any]:
    d_model, heads = s.count("embedding_length"), s.count("attention.head_count")
    fields = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "d_model": d_model,
        "d_ff": s.need("feed_forward_length"),
        "num_layers": s.need("block_count"),
        "num_heads": heads,
        "max_seq_len": s.need("context_length"),
        "tie_embeddings": "output.weight" not in file.tensors,
    }
    if arch == "gpt2":
        fields |= GPT2_SHAPE | {"num_kv_heads": heads, "head_dim": d_model // heads}
        return fields | {"norm_eps": s.number("attention.layer_norm_epsilon")}
    return fields | _llama_from_gguf(s, file, arch, d_model // heads)


def _llama_from_gguf(s: _Settings, file: gguf_file.GgufFile, arch: str, default_head_dim: int) -> dict[str, Any]:
    head_dim = s.get("attention.key_length", default_head_dim)
    s.only("rope.dimension_count", head_dim, head_dim)
    s.only("rope.scaling.type", "none", "none", "linear")
    s.only("expert_count", 0, 0)
    theta = s.number("rope.freq_base", 10000.0)
    scaling = None
    if s.get("rope.scaling.type", "none") == "linear":
        scaling = RotaryScaling(kind="linear", factor=s.number("rope.scaling.factor"))
    elif "rope_freqs.weight" in file.tensors:
        scaling = _llama3_from_gguf(file, head_dim, theta)
    return {
        "num_kv_heads": s.get("attention.head_count_kv", s.need("attention.head_count")),
        "head_dim": head_dim,
        "norm_eps": s.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": s.get("attention.sliding_window", None),
        "qk_norm": arch == "qwen3",
    }


def _llama3_from_gguf(file: gguf_file.GgufFile, head_dim: int, theta: float) -> RotaryScaling:
    """Recognise Llama 3's scaling by its divisors, which llama.cpp stores instead of the settings."""
    divisors = file.tensor("rope_freqs.weight")
    scaling = RotaryScaling(kind="llama3", factor=_shortest(divisors.max()))
    base, scaled = (np.array(rotary.frequencies(head_dim, theta, kind)) for kind in (None, scaling))
    if divisors.shape != base.shape or not np.allclose(divisors, base / scaled, rtol=1e-4):
        raise ValueError(
            f"{file.path}: rope_freqs.weight of shape {divisors.shape} with maximum {divisors.max()} is not Llama 3's "
            f"scaling with low_freq_factor=1, high_freq_factor=4 and trained context 8192"
        )
    return scaling


def _shortest(value: float) -> float:
    """Shortest decimal that rounds to this float32: a file's 9.99999975e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Hugging Face config.json of a decoder, in the form that transformers 4 and 5 both read.

    Raises:
      ValueError: no Hugging Face architecture has this combination of parts.
    """
    c = config
    shared = {"vocab_size": c.vocab_size, "tie_word_embeddings": c.tie_embeddings}
    is_ungrouped = (c.num_kv_heads, c.num_heads * c.head_dim, c.sliding_window) == (c.num_heads, c.d_model, None)
    if is_ungrouped and all(getattr(c, key) == value for key, value in GPT2_SHAPE.items()):
        keys = {"n_embd": c.d_model, "n_inner": c.d_ff, "n_layer": c.num_layers, "n_head": c.num_heads}
        keys |= {"n_positions": c.max_seq_len, "layer_norm_epsilon": c.norm_eps, "activation_function": "gelu_new"}
        return shared | keys | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    is_llama = (c.norm, c.activation, c.position) == ("rmsnorm", "swiglu", "rotary")
    if not is_llama or (c.use_bias and (c.sliding_window or c.qk_norm)):
        raise ValueError(
            f"model: no Hugging Face architecture has norm={c.norm}, activation={c.activation}, position={c.position}, "
            f"qk_norm={c.qk_norm}, use_bias={c.use_bias}, sliding_window={c.sliding_window}, "
            f"num_heads={c.num_heads}, num_kv_heads={c.num_kv_heads}, head_dim={c.head_dim}"
        )
    name = "Qwen3" if c.qk_norm else "Mistral" if c.sliding_window else "Llama"
    values = shared | {
        "model_type": name.lower(),
        "architectures": [f"{name}ForCausalLM"],
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_seq_len,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": _scaling_to_hf(c.rope_scaling),
    }
    window = {"sliding_window": c.sliding_window}
    if c.qk_norm:
        window |= {"use_sliding_window": bool(c.sliding_window), "max_window_layers": 0}
        return values | window | {"attention_bias": False}
    return values | (window if c.sliding_window else {"attention_bias": c.use_bias, "mlp_bias": c.use_bias})


def _scaling_to_hf(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
