"""Read a quantised Hugging Face folder (compressed-tensors' layout) as it is: integers, and 8-bit inputs if it has any
(S file).

`pretrained.weights.load_checkpoint` reads the same folder as float weights, without its 8-bit inputs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxbench.pretrained import compressed_tensors, weights
from jaxbench.quantization.recipe import QuantizedModel


def load(spec: str | Path) -> QuantizedModel:
    """Load a quantised folder, which linear.build and weight_only.build take; `errors` is empty.

    Raises:
      ValueError: see load_checkpoint; no quantised folder, a range of static inputs that is missing or not finite.
    """
    path = weights.resolve(spec)
    if not path.is_dir():
        raise ValueError(f"model: {spec} is a file, wanted a Hugging Face folder in the layout of compressed-tensors")
    tensors, config, family, _ = weights.open_folder(path)
    if tensors.activations == "other":
        raise ValueError(
            f"{path}: input_activations are not symmetric, or neither dynamic by token nor static by tensor"
        )
    if not tensors.matrices:
        raise ValueError(f"model: {spec} has no quantised matrix, wanted a folder in the layout of compressed-tensors")
    jobs = weights.plan(tensors, config, family)
    matrices, ranges = {}, {}
    for job in jobs:
        if job.name not in tensors.matrices:
            continue
        matrix, module = tensors.matrices[job.name](), job.ours[0].removesuffix(".kernel")
        compressed_tensors.check_scales(matrix, job.name, path)
        matrices[module] = matrix
        if tensors.activations == "static" and module.startswith("layers."):
            ranges[module] = _range(tensors, job.name)
    rest = [job for job in jobs if job.name not in tensors.matrices]
    params = weights.read_all(path, rest, lambda job: weights.values_of(tensors, job, config))
    return QuantizedModel(config, matrices, params, tensors.activations, ranges, {})


def _range(tensors: weights.Tensors, name: str) -> float:
    """The |x| that becomes 127."""
    place = f"{tensors.source}: {name.removesuffix('weight')}input_scale"
    if name not in tensors.input_ranges:
        raise ValueError(f"{place} is missing, wanted one of each matrix: its inputs have a static scale")
    value = tensors.input_ranges[name]()
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{place} is {value / 127}, wanted a positive number")
    return value
