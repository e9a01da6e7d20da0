"""Hugging Face config.json <-> configuration of a decoder (S file).

Readers' defaults are those of transformers' own configuration classes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jaxbench.config import RotaryScaling, TransformerConfig, shown
from jaxbench.pretrained import settings
from jaxbench.pretrained.families import GPT2_SHAPE, HF_FAMILIES
from jaxbench.pretrained.settings import Settings

# Parts that no family but Gemma's has.
GEMMA_ONLY = ("post_norms", "embedding_scale", "query_pre_attn_scalar", "attention_softcap", "logit_softcap")
GEMMA_ONLY += ("global_every", "local_rope_theta")
MEMORY = "jaxbench_memory"  # memory/folder.py's own
GPT2_NAMES = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions"}  # transformers' attribute_map
GPT2_NAMES |= {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
# Defaults of num_key_value_heads (None = as many as query heads) and of max_position_embeddings
DEFAULTS = {"llama": (None, 2048), "mistral": (8, 131072), "qwen2": (32, 32768), "qwen3": (32, 32768)}
DEFAULTS |= {"gemma": (16, 8192), "gemma2": (4, 8192), "gemma3_text": (4, 131072)}


def config_from_hf(values: dict[str, Any], source: Path) -> TransformerConfig:
    """Translate a Hugging Face config.json. Its dropout rates are a training recipe and are left out.

    Raises:
      ValueError: an unsupported architecture or setting, a missing one, or one that changes the function and is unknown
        to the reader of its family.
    """
    s = Settings(values, source)
    model_type = s.get("model_type", None)
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        if model_type == MEMORY:
            raise ValueError(
                f"{source}: {model_type} is a decoder with memory, which experiments/serve.py --model={source.parent} "
                "reads and this command does not"
            )
        wanted = ", ".join(HF_FAMILIES)
        raise ValueError(f"{source}: architecture {shown(model_type)} is not supported, wanted one of {wanted}")
    readers = {"gpt2": _gpt2_from_hf, "qwen2": _qwen_from_hf, "qwen3": _qwen_from_hf}
    if s.given("is_causal", True) is not True:  # null too: transformers then lets every token attend to all
        raise ValueError(f"{source}: is_causal={shown(values['is_causal'])} is not supported, wanted True")
    readers |= {"gemma": _gemma_from_hf, "gemma2": _gemma_from_hf, "gemma3_text": _gemma_from_hf}
    config = settings.build(readers.get(model_type, _llama_from_hf), s)
    settings.refuse_other_functions(s, config)
    return config


def _gpt2_from_hf(s: Settings) -> dict[str, Any]:
    s.only("activation_function", "gelu_new", "gelu_new", "gelu_pytorch_tanh")
    s.only("scale_attn_weights", True, True)
    s.only("scale_attn_by_inverse_layer_idx", False, False)
    s.only("add_cross_attention", False, False)
    s.values = s.values | {GPT2_NAMES[key]: value for key, value in s.values.items() if key in GPT2_NAMES}
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


def _llama_from_hf(s: Settings) -> dict[str, Any]:
    s.only("hidden_act", "silu", "silu")
    attention_bias, mlp_bias = s.get("attention_bias", False), s.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        raise ValueError(
            f"{s.source}: attention_bias={attention_bias} with mlp_bias={mlp_bias} is not supported, wanted them equal"
        )
    theta, scaling = _rotary_from_hf(s)
    return _shape_from_hf(s) | {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "use_bias": attention_bias,
        "sliding_window": s.given("sliding_window", 4096) if s.need("model_type") == "mistral" else None,
    }


def _shape_from_hf(s: Settings) -> dict[str, Any]:
    """Sizes, under the names that all families but GPT-2 have."""
    d_model, heads = s.count("hidden_size"), s.count("num_attention_heads")
    kv_heads = s.given("num_key_value_heads", DEFAULTS[s.need("model_type")][0])
    return {
        "vocab_size": s.need("vocab_size"),
        "d_model": d_model,
        "d_ff": s.need("intermediate_size"),
        "num_layers": s.need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": s.get("head_dim", d_model // heads),
        "max_seq_len": _max_positions(s),
        "norm_eps": s.get("rms_norm_eps", 1e-6),
        "tie_embeddings": s.get("tie_word_embeddings", False),
    }


def _max_positions(s: Settings) -> int:
    return s.get("max_position_embeddings", DEFAULTS[s.need("model_type")][1])


def _qwen_from_hf(s: Settings) -> dict[str, Any]:
    """Settings of Qwen2, which has biases on query, key and value, or of Qwen3, which normalises queries and keys."""
    is_third = s.need("model_type") == "qwen3"
    s.only("attention_bias", False, False)
    own = {"use_bias": False, "qkv_bias": not is_third, "qk_norm": is_third, "sliding_window": _qwen_window(s)}
    return _llama_from_hf(s) | own | ({"head_dim": s.get("head_dim", 128)} if is_third else {})


def _qwen_window(s: Settings) -> int | None:
    """Window of all layers, or None; Qwen's own files have a sliding_window that is not used."""
    given, layers, first = s.given("sliding_window", 4096), s.count("num_hidden_layers"), s.get("max_window_layers", 28)
    window = given if s.get("use_sliding_window", False) else None
    kinds = s.get("layer_types", None)
    if kinds is None:
        if window is not None and 0 < first < layers:
            raise ValueError(
                f"{s.source}: use_sliding_window=True with max_window_layers={shown(first)} is not supported, wanted "
                f"0, a window in every layer, or at least {layers}, a window in none"
            )
        return window if first < layers else None
    wanted = ["full_attention", *(["sliding_attention"] if window is not None else [])]
    if len(kinds) != layers or not any(all(each == kind for each in kinds) for kind in wanted):
        raise ValueError(
            f"{s.source}: layer_types={shown(kinds)} with sliding_window={shown(window)} is not supported, wanted "
            f"{' or '.join(map(repr, wanted))} for each of {layers} layers"
        )
    return window if kinds[0] == "sliding_attention" else None


def _gemma_from_hf(s: Settings) -> dict[str, Any]:
    """Settings of Gemma, Gemma 2, or Gemma 3 as far as it is a text decoder."""
    kind, tanh = s.need("model_type"), "gelu_pytorch_tanh"
    if kind == "gemma":
        s.only("hidden_act", tanh, tanh, "gelu")  # only for Gemma 1, transformers reads this as the approximation too
    else:
        s.only("hidden_activation", tanh, tanh)
    s.only("attention_bias", False, False)
    s.only("use_bidirectional_attention", False, False)
    own = _shape_from_hf(s) | {
        "head_dim": s.get("head_dim", 256),
        "tie_embeddings": s.get("tie_word_embeddings", True),
        "activation": "geglu",
        "embedding_scale": s.count("hidden_size") ** 0.5,
    }
    if kind != "gemma":
        own |= _gemma2_from_hf(s, own["head_dim"], has_caps=kind == "gemma2")
    if kind == "gemma3_text":
        return own | {"qk_norm": True} | _gemma3_rotary(s)
    theta, scaling = _rotary_from_hf(s)
    return own | {"rope_theta": theta, "rope_scaling": scaling}


def _gemma2_from_hf(s: Settings, head_dim: int, *, has_caps: bool) -> dict[str, Any]:
    """Features that Gemma 2 added: norms, caps on scores and logits, windows in all layers but every n-th."""
    layers, scalar = s.count("num_hidden_layers"), s.get("query_pre_attn_scalar", 256)
    default = 2 if has_caps else s.get("sliding_window_pattern", 6)
    if has_caps:
        s.only("sliding_window_pattern", 2, 2)
    pattern = lambda every: ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    kinds = s.get("layer_types", pattern(default))
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(default, layers + 1)
    if every < 2 or kinds != pattern(every):
        raise ValueError(
            f"{s.source}: layer_types={shown(kinds)} is not supported, wanted windows in all layers but every n-th"
        )
    if not has_caps:
        s.only("attn_logit_softcapping", None, None)
    return {
        "post_norms": True,
        "query_pre_attn_scalar": None if scalar == head_dim else scalar,
        "attention_softcap": s.given("attn_logit_softcapping", 50.0) if has_caps else None,
        "logit_softcap": s.given("final_logit_softcapping", 30.0 if has_caps else None),
        "sliding_window": s.given("sliding_window", 4096),
        "global_every": every,
    }


def _gemma3_rotary(s: Settings) -> dict[str, Any]:
    """Read either form: `rope_parameters` by kind of layer, or `rope_theta`, `rope_local_base_freq`, `rope_scaling`.

    A file may have both; `rope_scaling` then applies to the layers without a window.
    """
    rope, stretched = s.get("rope_parameters", {}), s.get("rope_scaling", {})
    local = {"rope_theta": s.get("rope_local_base_freq", 10000.0)} | (rope.get("sliding_attention") or {})
    wide = {"rope_theta": s.get("rope_theta", 1e6)} | (rope.get("full_attention") or {})
    if "rope_type" not in stretched and stretched.get("type", "default") != "default":
        raise ValueError(
            f"{s.source}: rope_scaling has type={shown(stretched['type'])}, wanted it under the name rope_type: "
            "transformers reads no other in gemma3_text"
        )
    near = Settings(local | {"rope_type": local.get("rope_type", local.get("type", "default"))}, s.source)
    near.only("rope_type", "default", "default")
    theta, scaling = _scaled(s, Settings(wide | stretched, s.source), s.get("rope_theta", 1e6), None)
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local["rope_theta"]}


def _rotary_from_hf(s: Settings) -> tuple[float, RotaryScaling | None]:
    """Read transformers 5 `rope_parameters`, or the older `rope_scaling`, which takes precedence if it is set.

    A trained context given next to these objects, not in them, takes precedence too.
    """
    newer, older = s.get("rope_parameters", {}), s.get("rope_scaling", {})
    context = s.get("original_max_position_embeddings", None)
    return _scaled(s, Settings(older or newer, s.source), s.get("rope_theta", 10000.0), context)


def _scaled(s: Settings, rope: Settings, theta: float, context: int | None) -> tuple[float, RotaryScaling | None]:
    """Base and scaling of one object of rotary settings; theta: its default; context: overrides the object's own."""
    rope.only("partial_rotary_factor", s.get("partial_rotary_factor", 1.0), 1.0)
    theta = rope.get("rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RotaryScaling(kind="linear", factor=rope.need("factor"))
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"{s.source}: rope scaling {kind!r} is not supported, wanted default, linear, llama3 or yarn")
    length = _max_positions(s)
    original = rope.get("original_max_position_embeddings", length) if context is None else context
    if kind == "yarn":
        return theta, _yarn_from_hf(rope, original, length)
    keys = {name: rope.need(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return theta, RotaryScaling(kind="llama3", original_max_seq_len=original, **keys)


def _yarn_from_hf(rope: Settings, original: int, length: int) -> RotaryScaling:
    """Settings of yarn; DeepSeek's mscale and mscale_all_dim become the equivalent factor."""
    factor = rope.get("factor", length / original)
    keys = {"beta_fast": rope.get("beta_fast", 32.0), "beta_slow": rope.get("beta_slow", 1.0)}
    truncate = rope.given("truncate", True)  # null is false, as in transformers
    keys |= {"truncate": truncate is not None and truncate, "attention_factor": rope.get("attention_factor", None)}
    scales = [rope.get(name, None) for name in ("mscale", "mscale_all_dim")]
    if keys["attention_factor"] is None and all(scales):
        above, below = (0.1 * scale * math.log(max(factor, 1.0)) + 1.0 for scale in scales)
        keys["attention_factor"] = above / below
    return RotaryScaling(kind="yarn", factor=factor, original_max_seq_len=original, **keys)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Make a decoder's Hugging Face config.json, in the form that transformers 4 and 5 both read.

    Raises:
      ValueError: no Hugging Face architecture has this combination of parts.
    """
    c = config
    if (name := _architecture(c)) is None or not c.is_causal:
        keys = ("norm", "activation", "position", "qk_norm", "use_bias", "qkv_bias", "sliding_window", "d_model")
        keys += ("num_heads", "num_kv_heads", "head_dim", "is_causal", *GEMMA_ONLY)
        parts = ", ".join(f"{key}={getattr(c, key)}" for key in keys)
        raise ValueError(f"model: no Hugging Face architecture has {parts}")
    model_type = {"GPT2": "gpt2", "Gemma3": "gemma3_text"}.get(name, name.lower())
    architecture = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    shared = {"model_type": model_type, "architectures": [architecture]}
    shared |= {"vocab_size": c.vocab_size, "tie_word_embeddings": c.tie_embeddings}
    if name == "GPT2":
        keys = {"n_embd": c.d_model, "n_inner": c.d_ff, "n_layer": c.num_layers, "n_head": c.num_heads}
        keys |= {"n_positions": c.max_seq_len, "layer_norm_epsilon": c.norm_eps, "activation_function": "gelu_new"}
        return shared | keys
    values = shared | {
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
    if name.startswith("Gemma"):
        return values | _gemma_to_hf(c, name)
    if name.startswith("Qwen"):
        return (
            values
            | window
            | {"use_sliding_window": bool(c.sliding_window), "max_window_layers": 0}
            | ({"attention_bias": False} if c.qk_norm else {})
        )
    return values | (window if name == "Mistral" else {"attention_bias": c.use_bias, "mlp_bias": c.use_bias})


def _architecture(c: TransformerConfig) -> str | None:
    """Find the architecture that has exactly a decoder's parts, as transformers spells it; None if there is none.

    transformers 5 refuses a Llama, Gemma 2 or Gemma 3 whose heads do not divide d_model, as after structured pruning,
    and a query_pre_attn_scalar that is no whole number. A Mistral without a window computes what a Llama computes, and
    has no such limit.
    """
    are_heads_even = c.d_model % c.num_heads == 0
    plain = {key: TransformerConfig.model_fields[key].default for key in GEMMA_ONLY}
    is_plain = all(getattr(c, key) == value for key, value in plain.items())
    is_ungrouped = (c.num_kv_heads, c.num_heads * c.head_dim, c.sliding_window) == (c.num_heads, c.d_model, None)
    if all(getattr(c, key) == value for key, value in GPT2_SHAPE.items()):
        return "GPT2" if is_ungrouped and is_plain and not c.qkv_bias else None
    if (c.norm, c.position) != ("rmsnorm", "rotary"):
        return None
    biases = (c.use_bias, c.qkv_bias)
    if c.activation == "geglu" and biases == (False, False) and c.embedding_scale == c.d_model**0.5:
        if all(getattr(c, key) == plain[key] for key in GEMMA_ONLY if key != "embedding_scale"):
            return None if c.qk_norm or c.sliding_window else "Gemma"
        is_whole = c.query_pre_attn_scalar is None or c.query_pre_attn_scalar % 1 == 0  # transformers 5 takes no other
        if not (c.post_norms and c.global_every and are_heads_even and is_whole):
            return None
        third = (c.qk_norm, c.local_rope_theta is not None, c.attention_softcap is None)
        return "Gemma3" if all(third) else None if any(third[:2]) else "Gemma2"
    if c.activation != "swiglu" or not is_plain:
        return None
    if c.qkv_bias:
        return None if c.use_bias or c.qk_norm else "Qwen2"
    is_mistral = bool(c.sliding_window) or not are_heads_even
    if c.use_bias and (is_mistral or c.qk_norm):
        return None
    return "Qwen3" if c.qk_norm else "Mistral" if is_mistral else "Llama"


def _gemma_to_hf(c: TransformerConfig, name: str) -> dict[str, Any]:
    """Settings of the Gemma families that differ from Llama's or are additional."""
    if name == "Gemma":
        return {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
    scalar = c.head_dim if c.query_pre_attn_scalar is None else c.query_pre_attn_scalar
    kinds = ["full_attention" if (i + 1) % c.global_every == 0 else "sliding_attention" for i in range(c.num_layers)]
    own = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "layer_types": kinds}
    own |= {"query_pre_attn_scalar": int(scalar)}
    own |= {"attn_logit_softcapping": c.attention_softcap, "final_logit_softcapping": c.logit_softcap}
    own |= {"sliding_window": c.sliding_window}
    return own | ({"rope_local_base_freq": c.local_rope_theta} if name == "Gemma3" else {})


def _scaling_to_hf(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        keys = {name: getattr(scaling, name) for name in ("factor", "beta_fast", "beta_slow", "truncate")}
        keys |= {"rope_type": "yarn", "original_max_position_embeddings": scaling.original_max_seq_len}
        return keys | ({"attention_factor": scaling.attention_factor} if scaling.attention_factor else {})
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
