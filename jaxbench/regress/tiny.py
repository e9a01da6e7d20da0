"""A decoder of bytes with random weights that runs in milliseconds, for tests and first trials (S file)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxbench import initial, outputs
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import small_tokenizers, weights

TOKENIZER = small_tokenizers.ByteTokenizer()
SHAPE = TransformerConfig(
    vocab_size=TOKENIZER.vocab_size, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_seq_len=512,
)  # fmt: skip


def save(folder: Path) -> None:
    """Write its folder if it does not exist."""
    if folder.exists():
        return
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(SHAPE, 0).items()}
    with outputs.whole_folder(folder) as made:
        weights.save_checkpoint(made, SHAPE, params, tokenizer=TOKENIZER)
