"""Linear layers whose weights stay integers in memory, with float inputs; a decoder built from them.

Twins: jaxbench/quantization/weight_only.py, jaxbench/eqx/quantization/weight_only.py. Differs from them: every
implementation name selects the same products; the JAX twins' kernel is written in Pallas.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jaxbench.config import Compute
from jaxbench.quantization import packing
from jaxbench.quantization.packing import Packed
from jaxbench.quantization.recipe import QuantizedModel
from torch_ref import functional, nn, transformer
from torch_ref.quantization import packed_matmul
from torch_ref.quantization.packed_matmul import Weights


class WeightOnlyLinear(torch.nn.Module):
    """Affine map of the last axis with packed weights; its arrays have shapes but no values until loaded."""

    def __init__(self, packed: Packed, *, use_bias: bool, dtype: str, implementation: str):
        super().__init__()
        packing.check_implementation(implementation)
        arrays = (packed.codes, packed.scales, packed.zeros)
        self.codes, self.scales, self.zeros = (
            None if array is None else _parameter(array.shape, array.dtype.name) for array in arrays
        )
        self.bias = _parameter(packed.codes.shape[1:], dtype) if use_bias else None
        self.form, self.implementation = packed.form, implementation

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Affine map x @ weights (+ bias)."""
        weights = Weights(self.form, self.codes, self.scales, self.zeros)
        return functional.add_bias(packed_matmul.matmul(x, weights), self.bias)


def _parameter(shape: tuple[int, ...], dtype: str) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)), requires_grad=False)


def build(
    model: QuantizedModel, *, dtype: str = "float32", implementation: str = "xla", attention: str = "dense",
    device: str = "cpu",
) -> transformer.Transformer:  # fmt: skip
    """Build a quantised model's decoder that holds its layers' matrices as integers; embedding and head are floats.

    Args:
      dtype: of everything else, and of the products.
      implementation: a name that the JAX twins know; the products are those of packed_matmul.matmul.
      attention: its implementation, see attention.py.

    Raises:
      ValueError: quantised activations, a scale not representable in its grid's scale_dtype, or an unknown
        implementation.
    """
    held, params = packing.parameters(model)
    with torch.device("meta"):
        decoder = transformer.Transformer(model.config, Compute(dtype=dtype, implementation=attention))
        for name, packed in held.items():
            _, index, part, module = name.split(".")
            use_bias = f"{name}.bias" in params
            linear = WeightOnlyLinear(packed, use_bias=use_bias, dtype=dtype, implementation=implementation)
            setattr(getattr(decoder.layers[int(index)], part), module, linear)
    # Types that numpy lacks are widened, which is exact, and narrowed again on loading.
    known = {n: v if v.dtype.kind in "iuf" else v.astype(np.float32) for n, v in params.items()}
    return nn.load_params(decoder, known, device=device)
