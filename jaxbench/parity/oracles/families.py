"""Every checkpoint family versus transformers: its random models through folders both ways, and GGUF files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

import torch_ref.transformer
from jaxbench.parity import cases, gates
from jaxbench.parity.oracles import transformers_model
from jaxbench.pretrained import families, weights

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOWS = {"sliding_window": 9, "query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention"]}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# In addition to one plain model of every family: options that families turn off by default.
VARIANTS = {
    "llama, llama3 rotary, tied": ("llama", GROUPED | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, biases, linear rotary": (
        "llama",
        GROUPED
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral, window": ("mistral", GROUPED | {"sliding_window": 9}),
    "qwen2, yarn rotary": ("qwen2", GROUPED | {"rope_parameters": YARN}),
    "gemma2, windows": (
        "gemma2",
        GROUPED | WINDOWS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3, windows": ("gemma3_text", GROUPED | WINDOWS | {"rope_parameters": BY_KIND}),
}
# Their files add 1 to norms, and transformers reads them only in part; tests/pretrained/test_gguf_file.py reads back
# what it wrote by the formulas instead.
WITHOUT_GGUF = {"gemma", "gemma2", "gemma3"}
LENGTH = 40
NORM_EPS = 2.0**-10  # large enough that a different value shows; a GGUF file holds it exactly


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """Two gates per model of a folder (read, written), and one per family of GGUF files that transformers reads."""
    plain = {name: (name, GROUPED if name != "gpt2" else {}) for name in families.HF_FAMILIES}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, (model_type, extra)) in enumerate((plain | VARIANTS).items()):
            settings = {"gpt2": {"layer_norm_epsilon": NORM_EPS}}.get(model_type, {"rms_norm_eps": NORM_EPS})
            config = transformers.AutoConfig.for_model(model_type, **SHAPE, **settings, **extra)
            found += _folder(name, transformers_model.random_model(config), Path(folder) / str(index))
        for arch in sorted(families.GGUF_FAMILIES.keys() - WITHOUT_GGUF):
            found.append(_gguf(arch, Path(folder) / f"{arch}.gguf"))
    return found


def tokens(vocab_size: int, *, length: int = LENGTH) -> np.ndarray:
    """Random tokens [2 T]."""
    return np.random.default_rng(0).integers(0, vocab_size, (2, length), dtype=np.int32)


def our_logits(path: Any, ids: np.ndarray) -> tuple[np.ndarray, weights.Checkpoint]:
    """Logits of torch_ref's model of a file or folder in float64, and the checkpoint read from it."""
    checkpoint = weights.load_checkpoint(path)
    model = torch_ref.transformer.build(checkpoint.config, checkpoint.params, dtype="float64")
    positions = torch.arange(ids.shape[1]).expand(*ids.shape)
    with torch.no_grad():
        return model(torch.from_numpy(ids), positions).numpy(), checkpoint


def _folder(name: str, theirs: torch.nn.Module, folder: Path) -> list[gates.Gate]:
    """Gates of a folder that transformers wrote, and of one that jaxbench wrote from it."""
    transformers_model.save(theirs, folder / "theirs")
    ids = tokens(SHAPE["vocab_size"])
    wanted = transformers_model.logits(theirs, ids)
    mine, checkpoint = our_logits(folder / "theirs", ids)
    weights.save_checkpoint(folder / "ours", checkpoint.config, checkpoint.params)
    again = transformers_model.logits(transformers_model.load(folder / "ours"), ids)
    source = transformers_model.name_of(theirs)
    return [
        gates.oracle(f"{name}: a folder of theirs", {"logits": mine}, {"logits": wanted}, source=source),
        gates.oracle(f"{name}: a folder of ours", {"logits": again}, {"logits": wanted}, source=source, tolerance=0.0),
    ]


def _gguf(arch: str, path: Path) -> gates.Gate:
    """Gate of a GGUF file of random tensors under llama.cpp's names, as transformers and jaxbench read it."""
    # Settings that transformers does not read from a GGUF file keep its defaults: head_dim, and GPT-2's context.
    own = {"max_position_embeddings": 1024} if arch == "gpt2" else {"num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(arch, **SHAPE | own, tie_word_embeddings=arch == "gpt2")
    _write_gguf(arch, transformers_model.random_model(config), path)
    ids = tokens(SHAPE["vocab_size"])
    wanted = transformers_model.logits(transformers_model.load(path), ids)
    mine, _ = our_logits(path, ids)
    source = f"transformers {transformers.__version__}, gguf's names of tensors"
    return gates.oracle(f"{arch}: a GGUF file", {"logits": mine}, {"logits": wanted}, source=source)


def _write_gguf(arch: str, model: torch.nn.Module, path: Path) -> None:
    """Write a model's values under the gguf package's names; rotary rows stay in transformers' order."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    c = model.config
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(SHAPE["intermediate_size"] if arch != "gpt2" else 4 * c.hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_token_list([str(i) for i in range(c.vocab_size)])  # transformers counts them
    if arch == "gpt2":
        writer.add_layer_norm_eps(NORM_EPS)
    else:
        writer.add_head_count_kv(c.num_key_value_heads)
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(NORM_EPS)
        writer.add_rope_freq_base(20000.0)
    linear = transformers.pytorch_utils.Conv1D
    flat = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, linear)}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        value = value.T if name in flat else value
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, np.ascontiguousarray(value.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
