"""Metadata of a GGUF file -> configuration of a decoder (S file)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxbench import rotary
from jaxbench.config import RotaryScaling, TransformerConfig, shown
from jaxbench.pretrained import gguf_file, settings
from jaxbench.pretrained.families import GGUF_FAMILIES, GPT2_SHAPE
from jaxbench.pretrained.settings import Settings, shortest


def config_from_gguf(file: gguf_file.GgufFile) -> TransformerConfig:
    """Translate a GGUF file's metadata; the tensors present reveal biases, tying and llama3 scaling.

    Raises:
      ValueError: an unsupported architecture or setting, or a missing one.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in GGUF_FAMILIES:
        wanted = ", ".join(GGUF_FAMILIES)
        raise ValueError(f"{file.path}: architecture {shown(arch)} is not supported, wanted one of {wanted}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: missing tensor token_embd.weight")
    s = Settings(file.metadata, file.path, f"{arch}.")
    return settings.build(lambda s: _from_gguf(s, file, arch), s)


def _from_gguf(s: Settings, file: gguf_file.GgufFile, arch: str) -> dict[str, Any]:
    s.only("attention.causal", True, True)
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


def _llama_from_gguf(s: Settings, file: gguf_file.GgufFile, arch: str, default_head_dim: int) -> dict[str, Any]:
    head_dim = s.get("attention.key_length", default_head_dim)
    s.only("rope.dimension_count", head_dim, head_dim)
    s.only("expert_count", 0, 0)
    theta = s.number("rope.freq_base", 10000.0)
    has_bias = "blk.0.attn_q.bias" in file.tensors
    is_bias_everywhere = "blk.0.attn_output.bias" in file.tensors
    own = {
        "num_kv_heads": s.get("attention.head_count_kv", s.need("attention.head_count")),
        "head_dim": head_dim,
        "norm_eps": s.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _scaling(s, file, head_dim, theta),
        "use_bias": has_bias and is_bias_everywhere,
        "qkv_bias": has_bias and not is_bias_everywhere,
        # llama.cpp ignores it; a converted Mistral needs it, and claims to be a Llama
        "sliding_window": (s.get("attention.sliding_window", 0) or None) if arch == "llama" else None,
        "qk_norm": arch in ("qwen3", "gemma3"),
    }
    return own | (_gemma_from_gguf(s, arch) if arch.startswith("gemma") else {})


def _gemma_from_gguf(s: Settings, arch: str) -> dict[str, Any]:
    """Settings that llama.cpp derives from the architecture's name (src/llama-model.cpp)."""
    d_model, heads, layers = s.count("embedding_length"), s.count("attention.head_count"), s.count("block_count")
    own = {"activation": "geglu", "embedding_scale": d_model**0.5, "post_norms": arch != "gemma"}
    if arch == "gemma":
        return own
    window, every = s.count("attention.sliding_window"), {"gemma2": 2, "gemma3": 6}[arch]
    s.only("attention.sliding_window_pattern", every, every)
    own |= {"sliding_window": window, "global_every": every}
    if layers == {"gemma2": 46, "gemma3": 62}[arch]:  # the 27B models, which divide scores by another root
        own["query_pre_attn_scalar"] = d_model / heads
    caps = {"attention_softcap": 50.0, "logit_softcap": 30.0} if arch == "gemma2" else {}
    names = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    if arch == "gemma3":  # llama.cpp caps no scores there
        s.only(names.pop("attention_softcap"), 0.0, 0.0)
    for ours, theirs in names.items():
        own[ours] = s.number(theirs, caps.get(ours)) if s.get(theirs, caps.get(ours)) is not None else None
    if arch == "gemma3":
        own["rope_theta"] = s.number("rope.freq_base", 1e6)
        own["local_rope_theta"] = s.number("rope.freq_base_swa", 10000.0)
    return own


def _scaling(s: Settings, file: gguf_file.GgufFile, head_dim: int, theta: float) -> RotaryScaling | None:
    kind, has_freqs = s.get("rope.scaling.type", "linear"), "rope_freqs.weight" in file.tensors
    s.only("rope.scaling.type", "linear", "none", "linear", "yarn")
    factor = s.number("rope.scaling.factor", s.get("rope.scale_linear", 1.0)) or 1.0  # the older name; 0 is none too
    is_scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if is_scaled and has_freqs:
        raise ValueError(
            f"{s.source}: rope_freqs.weight beside {s.prefix}rope.scaling.type={kind!r} of factor {factor} is not "
            "supported, wanted one of them"
        )
    if kind != "yarn":
        s.only("rope.scaling.attn_factor", 1.0, 1.0)
        if is_scaled:
            return RotaryScaling(kind="linear", factor=factor)
        return _llama3_from_gguf(file, head_dim, theta) if has_freqs else None
    s.only("rope.scaling.yarn_log_multiplier", 0.0, 0.0)
    s.only("rope.scaling.yarn_ext_factor", 1.0, 1.0)
    scaling = RotaryScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=s.get("rope.scaling.original_context_length", s.need("context_length")),
        beta_fast=s.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=s.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    extra = s.number("rope.scaling.attn_factor", 1.0)  # llama.cpp's multiplies the paper's
    return scaling if extra == 1.0 else scaling.model_copy(update={"attention_factor": extra * scaling.magnitude})


def _llama3_from_gguf(file: gguf_file.GgufFile, head_dim: int, theta: float) -> RotaryScaling:
    """Recover Llama 3's scaling from its divisors, which llama.cpp stores instead of the settings."""
    divisors = file.tensor("rope_freqs.weight")
    scaling = RotaryScaling(kind="llama3", factor=shortest(divisors.max()))
    base, scaled = (np.array(rotary.frequencies(head_dim, theta, kind)) for kind in (None, scaling))
    if divisors.shape != base.shape or not np.allclose(divisors, base / scaled, rtol=1e-4):
        raise ValueError(
            f"{file.path}: rope_freqs.weight of shape {divisors.shape} with maximum {divisors.max()} is not Llama 3's "
            f"scaling with low_freq_factor=1, high_freq_factor=4 and trained context 8192"
        )
    return scaling
