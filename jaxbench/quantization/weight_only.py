"""Linear layers whose weights stay integers in memory, with float inputs; a decoder built from them.

Twins: torch_ref/quantization/weight_only.py, jaxbench/eqx/quantization/weight_only.py. On CPUs the native kernels
(jaxbench/native) are the fast ones; this form is for GPUs and TPUs.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxbench import functional, libtpu, nn, transformer
from jaxbench.config import Compute
from jaxbench.quantization import packing, weight_only_pallas
from jaxbench.quantization.packed_matmul import Weights
from jaxbench.quantization.packing import Packed
from jaxbench.quantization.recipe import QuantizedModel


class WeightOnlyLinear(nnx.Module):
    """Affine map of the last axis with packed weights; its arrays have shapes but no values until loaded."""

    def __init__(self, packed: Packed, *, use_bias: bool, dtype: str, implementation: str):
        packing.check_implementation(implementation)
        arrays = (packed.codes, packed.scales, packed.zeros)
        self.codes, self.scales, self.zeros = (
            None if array is None else nnx.Param(jnp.zeros(array.shape, array.dtype)) for array in arrays
        )
        self.bias = nnx.Param(jnp.zeros((packed.codes.shape[1],), dtype)) if use_bias else None
        self.form, self.implementation = packed.form, implementation

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Affine map x @ weights (+ bias)."""
        zeros = None if self.zeros is None else self.zeros[...]
        weights = Weights(self.form, self.codes[...], self.scales[...], zeros)
        out = weight_only_pallas.matmul(x, weights, implementation=self.implementation)
        return functional.add_bias(out, None if self.bias is None else self.bias[...])


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
        decoder = transformer.Transformer(model.config, Compute(dtype=dtype, implementation=attention))
        for name, packed in held.items():
            _, index, part, module = name.split(".")
            use_bias = f"{name}.bias" in params
            linear = WeightOnlyLinear(packed, use_bias=use_bias, dtype=dtype, implementation=implementation)
            setattr(getattr(decoder.layers[int(index)], part), module, linear)
        return decoder

    return nn.load_params(nnx.eval_shape(make), params)
