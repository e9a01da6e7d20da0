"""Rotary frequencies as transformers computes them, for every kind of scaling."""

from __future__ import annotations

import numpy as np
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jaxbench import rotary
from jaxbench.config import RotaryScaling
from jaxbench.parity import cases, gates
from jaxbench.parity.oracles import transformers_model

# By kind: our scaling, and the settings of a Hugging Face config.json.
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0}
SCALINGS = {
    "none": (None, {"rope_type": "default"}),
    "linear": (RotaryScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RotaryScaling(kind="llama3", original_max_seq_len=64, **LLAMA3),
        {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
    ),
    "yarn": (
        RotaryScaling(kind="yarn", original_max_seq_len=64, **YARN),
        {"rope_type": "yarn", "original_max_position_embeddings": 64, **YARN},
    ),
}
SHAPES = ((8, 1e4), (64, 5e5), (128, 1e6))  # width of a head, base


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """One gate per kind of scaling."""
    found = []
    for kind, (scaling, settings) in SCALINGS.items():
        ours = {f"head_dim {d}, theta {t:g}": np.array(rotary.frequencies(d, t, scaling)) for d, t in SHAPES}
        wanted = {f"head_dim {d}, theta {t:g}": _theirs(d, t, settings) for d, t in SHAPES}
        source = f"transformers {transformers.__version__}: LlamaRotaryEmbedding"
        found.append(gates.oracle(f"rotary frequencies, scaling {kind}", ours, wanted, source=source))
    return found


def _theirs(head_dim: int, theta: float, settings: dict) -> np.ndarray:
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=512,
        rope_parameters=settings | {"rope_theta": theta},
    )  # fmt: skip
    with transformers_model.wide():
        return LlamaRotaryEmbedding(config).inv_freq.numpy()
