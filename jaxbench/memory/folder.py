"""A decoder with memory as a folder: config.json, model.safetensors with jaxbench's names, tokenizer (S file).

No Hugging Face architecture has such layers. The folder holds everything that determines a decoder's outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from jaxbench import initial, outputs
from jaxbench.memory.decoder_config import MemoryTransformerConfig
from jaxbench.pretrained import safetensors_files, weights

MODEL_TYPE = "jaxbench_memory"
TENSORS = "model.safetensors"


def save(
    folder: str | Path, config: MemoryTransformerConfig, params: Mapping[str, np.ndarray], *, tokenizer: Any = None
) -> Path:
    """Write the folder atomically: all of it appears, or nothing.

    Raises:
      ValueError: the folder has content, or the parameters are not the configuration's.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"save: {folder} exists and is not an empty folder; choose another name or remove it")
    _check(str(folder), config, {name: np.shape(value) for name, value in params.items()})
    ids = {"bos_token_id": getattr(tokenizer, "bos_id", None), "eos_token_id": getattr(tokenizer, "eos_id", None)}
    values = {"model_type": MODEL_TYPE, "decoder": config.model_dump(mode="json")} | ids
    with outputs.whole_folder(folder) as made:
        outputs.save_tensors(made / TENSORS, {name: np.ascontiguousarray(value) for name, value in params.items()})
        (made / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(made)
    return folder


def is_memory(spec: str | Path | None) -> bool:
    """True if a model's name is the folder of a decoder with memory."""
    if spec is None or not (file := Path(spec).expanduser() / "config.json").is_file():
        return False
    return safetensors_files.read_json(file).get("model_type") == MODEL_TYPE


def read_config(folder: str | Path) -> MemoryTransformerConfig:
    """Configuration of a decoder with memory, without reading a tensor.

    Raises:
      ValueError: the folder holds none, or one with a field that is unknown or out of range.
    """
    file = Path(folder).expanduser() / "config.json"
    values = safetensors_files.read_json(file)
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{file}: model_type is {values.get('model_type')!r}, wanted {MODEL_TYPE!r}")
    try:
        return MemoryTransformerConfig(**values.get("decoder", {}))
    except (pydantic.ValidationError, TypeError) as error:
        raise ValueError(f"{file}: decoder: {' '.join(str(error).split())[:300]}") from error


def load(folder: str | Path) -> weights.Checkpoint:
    """Load a decoder with memory.

    Raises:
      ValueError: as read_config; or a tensor is missing, unused, misshapen or not finite, or a file damaged.
    """
    folder = Path(folder).expanduser()
    config, file = read_config(folder), folder / TENSORS
    if not file.is_file():
        raise ValueError(f"{folder}: missing {TENSORS}")
    shapes, _, read = safetensors_files.opened([file])
    _check(str(file), config, shapes)
    params = {name: read(name) for name in shapes}
    odd = [name for name, value in params.items() if not np.isfinite(value).all()]
    if odd:
        raise ValueError(f"{file}: values that are not finite in {', '.join(odd[:3])}")
    return weights.Checkpoint(config, params, folder, folder.name, weights.checksum(folder))


def _check(place: str, config: MemoryTransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    problems = initial.mismatches(initial.parameter_shapes(config), shapes)
    listed = "; ".join(f"{kind}: {', '.join(names[:8])}" for kind, names in problems.items() if names)
    if listed:
        raise ValueError(f"{place}: {listed}")
