"""Linear layers whose weights stay integers in memory, with float inputs; a decoder built from them.

Twins: jaxbench/quantization/weight_only.py, torch_ref/quantization/weight_only.py. It uses the Flax twin's product.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxbench import functional, libtpu
from jaxbench.config import Compute
from jaxbench.eqx import nn, transformer
from jaxbench.quantization import packing, weight_only_pallas
from jaxbench.quantization.packed_matmul import Weights
from jaxbench.quantization.packing import Form, Packed
from jaxbench.quantization.recipe import QuantizedModel, layer_modules


class WeightOnlyLinear(eqx.Module):
    """Affine map of the last axis with packed weights; its arrays have shapes but no values until loaded."""

    codes: Array
    scales: Array
    zeros: Array | None
    bias: Array | None
    form: Form = eqx.field(static=True)
    implementation: str = eqx.field(static=True)

    def __init__(self, packed: Packed, *, use_bias: bool, dtype: str, implementation: str):
        packing.check_implementation(implementation)
        arrays = (packed.codes, packed.scales, packed.zeros)
        self.codes, self.scales, self.zeros = (
            None if array is None else jnp.zeros(array.shape, array.dtype) for array in arrays
        )
        self.bias = jnp.zeros((packed.codes.shape[1],), dtype) if use_bias else None
        self.form, self.implementation = packed.form, implementation

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Affine map x @ weights (+ bias)."""
        weights = Weights(self.form, self.codes, self.scales, self.zeros)
        out = weight_only_pallas.matmul(x, weights, implementation=self.implementation)
        return functional.add_bias(out, self.bias)


def build(
    model: QuantizedModel, *, dtype: str = "float32", implementation: str = "xla", attention: str = "dense"
) -> transformer.Transformer:
    """Build a quantised model's decoder that holds its layers' matrices as integers; embedding and head are floats.

    Args:
      dtype: of everything else, and of the products.
      implementation: of the products, see weight_only_pallas.matmul.
      attention: its implementation, see attention.py.

    Raises:
      ValueError: quantised activations, a scale not representable in its grid's scale_dtype, or an unknown
        implementation.
    """
    libtpu.leave_out_if_absent()
    held, params = packing.parameters(model)

    def make() -> transformer.Transformer:
        linears = [
            WeightOnlyLinear(packed, use_bias=f"{name}.bias" in params, dtype=dtype, implementation=implementation)
            for name, packed in held.items()
        ]
        floats = transformer.Transformer(model.config, Compute(dtype=dtype, implementation=attention))
        return eqx.tree_at(lambda tree: layer_modules(tree, held), floats, linears)

    return nn.load_params(eqx.filter_eval_shape(make), params)
