"""Model families as tables: how Hugging Face and GGUF files name and store parameters (S file).

A rule maps one module of a file to one or several of ours; `{i}` is the layer. The kind says how values are stored:
  embed        (rows, D), as ours
  norm         scale and bias vectors, as ours
  shifted      scale vectors minus 1; Gemma's, which llama.cpp stores as ours
  linear       (out, in), ours transposed
  conv1d       (in, out), as ours; GPT-2's Conv1D
  interleaved  (out, in) with rotary pairs side by side in each head, as llama.cpp stores query and key kernels;
               ours keeps the two halves of each head apart (rotate-half)
If a rule names several of ours, their outputs are concatenated in that order.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Rule(NamedTuple):
    """One row of a table: module name in the file, our module names, how values are stored."""

    theirs: str
    ours: tuple[str, ...]
    kind: Literal["embed", "norm", "shifted", "linear", "conv1d", "interleaved"]


class Family(NamedTuple):
    """How one kind of file stores one family."""

    rules: tuple[Rule, ...]
    prefix: str = ""  # some files omit this prefix from all names but the head's
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
HF_GEMMA = HF_LLAMA._replace(
    rules=tuple(rule._replace(kind="shifted") if rule.kind == "norm" else rule for rule in HF_LLAMA.rules)
)
_POST_NORMS = {  # Gemma 2 and 3 have four norms per layer; Llama's name for mlp_norm is attention_post_norm here
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
HF_GEMMA2 = HF_GEMMA._replace(
    rules=(
        *(rule for rule in HF_GEMMA.rules if "post_attention_layernorm" not in rule.theirs),
        *(Rule(f"model.layers.{{i}}.{a}", (f"layers.{{i}}.{b}",), "shifted") for a, b in _POST_NORMS.items()),
    )
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
GGUF_HALVES = GGUF_LLAMA._replace(  # all but Llama's: llama.cpp rotates their halves of heads, as ours
    rules=(
        *(rule._replace(kind="linear") if rule.kind == "interleaved" else rule for rule in GGUF_LLAMA.rules),
        Rule("blk.{i}.attn_q_norm", ("layers.{i}.attention.q_norm",), "norm"),  # Qwen3, Gemma 3
        Rule("blk.{i}.attn_k_norm", ("layers.{i}.attention.k_norm",), "norm"),
        Rule("blk.{i}.post_attention_norm", ("layers.{i}.attention_post_norm",), "norm"),  # Gemma 2 and 3
        Rule("blk.{i}.post_ffw_norm", ("layers.{i}.mlp_post_norm",), "norm"),
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
HF_FAMILIES = {
    "llama": HF_LLAMA,
    "mistral": HF_LLAMA,
    "gpt2": HF_GPT2,
    "qwen2": HF_LLAMA,
    "qwen3": HF_LLAMA,
    "gemma": HF_GEMMA,
    "gemma2": HF_GEMMA2,
    "gemma3_text": HF_GEMMA2,
}
GGUF_FAMILIES = {"llama": GGUF_LLAMA, "gpt2": GGUF_GPT2}
GGUF_FAMILIES |= dict.fromkeys(("qwen2", "qwen3", "gemma", "gemma2", "gemma3"), GGUF_HALVES)
GPT2_SHAPE = {"norm": "layernorm", "activation": "gelu", "position": "learned", "qk_norm": False, "use_bias": True}
