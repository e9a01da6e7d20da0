"""Decoders of random weights with few bits, for speeds alone (S file)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.quantization import packing, quantize
from jaxbench.quantization.recipe import QuantizedModel, Recipe

# A scale an output, and one for 32 inputs.
RECIPES = {
    "int8": Recipe(bits=8, group_size=None, scale_dtype="float32", embedding_bits=None),
    "int4": Recipe(bits=4, group_size=32, embedding_bits=None),
}
PRODUCTS = ("xla", "pallas")


def random_model(config: TransformerConfig, weights: str) -> QuantizedModel:
    """A decoder whose layers all have the first one's matrices, with a bit width of RECIPES.

    Rounding a billion weights takes longer than a lease of a GPU; put on a device each layer has memory of its own.
    """
    one = config.model_copy(update={"num_layers": 1})
    made = quantize.quantize(one, initial.initial_params(one, seed=0), RECIPES[weights])

    def repeated(found: dict[str, Any]) -> dict[str, Any]:
        own = {name.removeprefix("layers.0."): value for name, value in found.items() if name.startswith("layers.0.")}
        layers = {f"layers.{i}.{name}": value for i in range(config.num_layers) for name, value in own.items()}
        return layers | {name: value for name, value in found.items() if not name.startswith("layers.0.")}

    return made._replace(config=config, matrices=repeated(made.matrices), params=repeated(made.params))


def check_kernel(model: QuantizedModel, misfit: Callable[[packing.Form], str]) -> None:
    """Check that a kernel takes every matrix of a decoder's layers.

    misfit: weight_only_pallas.misfit, which says why it does not take one.

    Raises:
      ValueError: it does not, and XLA would compute the product.
    """
    for name, matrix in model.matrices.items():
        reason = misfit(packing.Form(matrix.grid, matrix.codes.shape[1]))
        if reason and name.startswith("layers."):
            raise ValueError(f"--products=pallas: no kernel for {name}: {reason}")
