"""A random model of one layer whose tokens are bytes, with a chat template, and loaders that hand it out."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.generation import decoder
from jaxbench.native import library
from jaxbench.pretrained import small_tokenizers, weights

CONFIG = TransformerConfig(
    vocab_size=257, d_model=32, d_ff=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, max_seq_len=128
)
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
MODULES = {
    "flax": ("jaxbench.transformer", "jaxbench.sample", "jaxbench.native.model"),
    "equinox": ("jaxbench.eqx.transformer", "jaxbench.sample", "jaxbench.eqx.native.model"),
    "torch": ("torch_ref.transformer", "torch_ref.sample", "torch_ref.native.model"),
}
NEEDS_NATIVE = "native kernels cannot be had on this machine (no C compiler)"


def has_native() -> bool:
    """Return whether native kernels can be had."""
    return library.is_available()


def make(folder: Path, *, template: str = TEMPLATE, **changes: int) -> Path:
    """Write the model as a Hugging Face folder; changes: of its configuration."""
    config = CONFIG.model_copy(update=changes)
    params = initial.initial_params(config, 0, distinct=True)
    weights.save_checkpoint(folder, config, params, tokenizer=small_tokenizers.ByteTokenizer())
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def load(folder: Path, backend: str = "flax", kernels: str = "xla") -> decoder.Decoder:
    """Load it for a backend."""
    choice = decoder.choose(decoder.Options(kernels), "cpu")
    return decoder.load(folder, choice, decoder.Backend(*map(importlib.import_module, MODULES[backend])))
