"""Write a quantised model as a Hugging Face folder in compressed-tensors' layout (S file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxbench import outputs
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import compressed_tensors, hf_config, weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.quantization.recipe import QuantizedModel


def check(folder: str | Path, source: str | Path | None) -> None:
    """Check, before anything is computed, that a folder can be written.

    Raises:
      ValueError: it has content, is the source, or is in a place that is not writable.
    """
    path = Path(folder)
    if source is not None and outputs.is_same(path, source):
        raise ValueError(f"--output={folder} is the input; name another folder")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"--output={folder} exists and is not an empty folder; choose another name or remove it")
    outputs.check_folder(path, flag="--output")


def check_model(config: TransformerConfig) -> None:
    """Check, before anything is computed, that the layout supports a model's family.

    Raises:
      ValueError: it does not: GPT-2's matrices are no linear layers.
    """
    family = hf_config.config_to_hf(config)["model_type"]
    if family == "gpt2":
        raise ValueError(f"--output: the layout is for linear layers, {family} has Conv1D in their place")


def save(folder: str | Path, model: QuantizedModel, source: str | Path | None, *, tokenizer: Any = None) -> Path:
    """Write a model's integers, its other parameters in float32, and a tokenizer (by default, that of its source).

    Raises:
      ValueError: the layout does not support the model's grids, or its family's matrices are no linear layers (GPT-2).
    """
    check_model(model.config)
    grid = next(iter(model.matrices.values())).grid
    described = compressed_tensors.described(grid, model.activations)
    matrices = {}
    for name, matrix in model.matrices.items():
        if matrix.grid != grid or not name.startswith("layers."):
            raise ValueError(f"--output: {name} lies on {matrix.grid}, the layout takes layers alone, all on {grid}")
        matrices[name] = compressed_tensors.stored(matrix, described["format"])
        if name in model.input_ranges:
            matrices[name]["input_scale"] = np.array([model.input_ranges[name] / 127], np.float32)
    return weights.save_checkpoint(
        folder, model.config, model.params, tokenizer=tokenizer or load_tokenizer(source), matrices=matrices,
        quantization=described,
    )  # fmt: skip
