"""Shapes and initial values of parameters versus those of transformers' models, through a folder that it reads."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import scipy.stats
import torch
import transformers

from jaxbench import initial
from jaxbench.parity import cases, gates
from jaxbench.parity.oracles import transformers_model
from jaxbench.pretrained import hf_config, weights

SHAPE = {
    "vocab_size": 251, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
THEIRS = {
    "llama": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "gpt2": transformers.GPT2Config(
        vocab_size=251, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
    ),
}
# transformers scales the initial kernels at the end of a residual branch by 1 / sqrt(2 layers), as GPT-2's authors did.
NARROWER = (".c_proj.weight",)


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """Gates of the number, distribution and independence of each family's parameters."""
    found = []
    for name, settings in THEIRS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(settings)
        config = hf_config.config_from_hf(settings.to_dict(), Path(name))
        params = initial.initial_params(config, 0)
        count = {name: initial.num_parameters(config)}
        source = transformers_model.name_of(model)
        numbers = {name: model.num_parameters()}
        found.append(gates.oracle(f"number of parameters, {name}", count, numbers, source=source, tolerance=0.0))
        with tempfile.TemporaryDirectory() as folder:
            weights.save_checkpoint(Path(folder) / name, config, params)
            ours = transformers_model.load(Path(folder) / name)
        found += _distributions(name, ours.state_dict(), model.state_dict(), source)
        found.append(_independence(name, params))
    return found


def _distributions(name: str, ours: dict, theirs: dict, source: str) -> list[gates.Gate]:
    """Gates of constants (equal to theirs) and of random tensors (same distribution by Kolmogorov and Smirnov)."""
    constants, wanted, p_values = {}, {}, {}
    for key, value in theirs.items():
        mine, other = ours[key].numpy().ravel(), value.numpy().ravel()
        if np.ptp(other) == 0.0:
            constants[key], wanted[key] = mine, other
        elif not key.endswith(NARROWER):
            p_values[key] = float(scipy.stats.ks_2samp(mine, other).pvalue)
    return [
        gates.oracle(f"initial constants, {name}", constants, wanted, source=source, tolerance=0.0),
        gates.chance(f"initial distributions, {name}", p_values, source=f"{source}, scipy.stats.ks_2samp"),
    ]


def _independence(name: str, params: dict[str, np.ndarray]) -> gates.Gate:
    """Gate of the correlation between the first values of any two random tensors."""
    drawn = {key: value.ravel()[:1000] for key, value in params.items() if np.ptp(value) > 0}
    p_values = {
        f"{a} and {b}": float(scipy.stats.pearsonr(drawn[a], drawn[b]).pvalue)
        for a, b in itertools.combinations(drawn, 2)
    }
    return gates.chance(f"independent tensors, {name}", p_values, source="scipy.stats.pearsonr")
