"""Decoders with random quantised weights, for speed measurements only (S file)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.quantization import packing, quantize
from jaxbench.quantization.recipe import QuantizedModel, Recipe

# int8: one scale per output; int4: one per 32 inputs.
RECIPES = {
    "int8": Recipe(bits=8, group_size=None, scale_dtype="float32", embedding_bits=None),
    "int4": Recipe(bits=4, group_size=32, embedding_bits=None),
}
PRODUCTS = ("xla", "pallas")


def random_model(config: TransformerConfig, weights: str) -> QuantizedModel:
    """Return a decoder quantised with one of RECIPES, in which all layers have the first layer's matrices.

    Quantising a billion weights would take longer than a lease of a GPU. On a device each layer has its own memory.
    """
    one = config.model_copy(update={"num_layers": 1})
    made = quantize.quantize(one, initial.initial_params(one, seed=0), RECIPES[weights])

    def repeated(found: dict[str, Any]) -> dict[str, Any]:
        own = {name.removeprefix("layers.0."): value for name, value in found.items() if name.startswith("layers.0.")}
        layers = {f"layers.{i}.{name}": value for i in range(config.num_layers) for name, value in own.items()}
        return layers | {name: value for name, value in found.items() if not name.startswith("layers.0.")}

    return made._replace(config=config, matrices=repeated(made.matrices), params=repeated(made.params))


def check_kernel(model: QuantizedModel, misfit: Callable[[packing.Form], str]) -> None:
    """Check that a kernel supports every matrix of a decoder's layers.

    misfit: weight_only_pallas.misfit, which says why the kernel does not support a matrix.

    Raises:
      ValueError: a matrix is not supported, so that XLA would compute its product.
    """
    for name, matrix in model.matrices.items():
        reason = misfit(packing.Form(matrix.grid, matrix.codes.shape[1]))
        if reason and name.startswith("layers."):
            raise ValueError(f"--products=pallas: no kernel for {name}: {reason}")
