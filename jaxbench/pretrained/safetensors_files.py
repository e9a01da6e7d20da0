"""The safetensors and JSON files of a Hugging Face folder (S file)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench.config import shown


def weight_map(index: Path) -> dict[str, str]:
    """File name of every tensor, from the index of a folder of several safetensors files."""
    found = read_json(index).get("weight_map")
    wanted = "wanted an object of tensor: file"
    if not isinstance(found, dict):
        raise ValueError(f"{index}: weight_map is a {type(found).__name__}, {wanted}")
    for name, file in found.items():
        if not isinstance(file, str):
            raise ValueError(f"{index}: weight_map has {name!r}: {shown(file)}, {wanted}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
      ValueError: the file is missing, damaged, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a {type(values).__name__}, wanted an object")
    return values


def opened(files: list[Path]) -> tuple[dict[str, tuple[int, ...]], dict[str, str], Callable]:
    """Return shapes and types of all tensors in a folder's safetensors files, and a reader of one as stored."""
    import ml_dtypes  # noqa: F401  gives numpy the name bfloat16, which safetensors looks up
    import safetensors

    home, shapes, types = {}, {}, {}
    for file in files:
        try:
            content = safetensors.safe_open(file, framework="np")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file}: truncated or corrupt safetensors file ({error}); fetch it again") from error
        for name in content.keys():  # noqa: SIM118  not a mapping
            part = content.get_slice(name)
            home[name], shapes[name], types[name] = file, tuple(part.get_shape()), part.get_dtype()

    def read(name: str) -> np.ndarray:
        # Reopened for each tensor: the pages of a file that stays open add up to its size in memory.
        with safetensors.safe_open(home[name], framework="np") as content:
            return content.get_tensor(name)

    return shapes, types, read


def annotated(path: Path, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the JSON object under `key` in a file's metadata, and its tensors.

    Raises:
      ValueError: the file is damaged, or has no such object.
    """
    import ml_dtypes  # noqa: F401  as above
    import safetensors

    try:
        with safetensors.safe_open(path, framework="np") as content:
            about = json.loads((content.metadata() or {})[key])
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        what = key.replace("_", " ")
        raise ValueError(f"{what}: {path} is damaged or no {what} ({error!r})") from error
    if not isinstance(about, dict):
        raise ValueError(f"{path}: {key!r} is a {type(about).__name__}, wanted an object")
    return about, tensors
