"""How a decoder reads responses: the settings that determine features, given the texts (S file)."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from jaxbench import config
from jaxbench.quantization.recipe import Recipe


class ReaderSettings(config.Base):
    """How a decoder reads: the settings that determine a response's features, given the texts."""

    model: str | None = None  # GGUF file, Hugging Face folder or hub id; None = the default model
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # weights and products
    bits: Literal[2, 3, 4, 8] | None = None  # of the weights of blocks' matrices, stored as integers; None = as dtype
    style: Literal["plain", "chat"] = "plain"  # the text around the context
    share: float = pydantic.Field(default=0.1, gt=0, le=1)  # of the context's tokens that counts as attended to
    lens_tokens: int | None = pydantic.Field(default=8, gt=0)  # tokens of a response with parametric scores; None = all
    window: int | None = pydantic.Field(default=None, gt=1)  # tokens of prompt and response; None = the model's
    state_layer: int | None = pydantic.Field(default=None, ge=0)  # the block whose output is kept; None = two thirds up
    row_tokens: int = pydantic.Field(default=512, gt=0)  # slots that responses to one prompt share

    def layer(self, num_layers: int) -> int:
        """The block whose output is kept.

        Raises:
          ValueError: the model has no such block.
        """
        layer = 2 * num_layers // 3 if self.state_layer is None else self.state_layer
        if layer >= num_layers:
            raise ValueError(f"state_layer={layer}: the model has {num_layers} blocks, counted from 0")
        return layer

    @property
    def recipe(self) -> Recipe | None:
        """How the blocks' matrices are rounded; None = they stay floats.

        Of the grids that need no calibration, groups of 32 with a least weight and searched scales have the smallest
        weight error at every width. A file in GGUF's Q4_1, such as the default model's, keeps its weights with 4 bits.
        """
        if self.bits is None:
            return None
        return Recipe(bits=self.bits, zero="least", scales="mse", embedding_bits=None)

    def identity(self) -> dict[str, Any]:
        """Settings that affect features, apart from the model's weights and the code; how rows are shared does not."""
        found = self.model_dump(exclude={"model", "row_tokens", "bits"})
        return found if self.recipe is None else found | {"recipe": self.recipe.model_dump()}
