"""Which projections of a decoder have a low-rank adapter, the adapters' parameters and initial values (S file).

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import math

import numpy as np
import pydantic

from jaxbench import philox
from jaxbench.config import Base, TransformerConfig

ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
PARAMETERS = r"layers\.\d+\.(attention|mlp)\.\w+\.lora_[ab]\.kernel"  # names of the adapters' parameters


class LoraConfig(Base):
    """Adapters: they add alpha / rank * dropout(x) A B to x W."""

    rank: int = pydantic.Field(default=8, gt=0)
    alpha: float = pydantic.Field(default=16.0, gt=0)
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)  # of the adapters' inputs
    targets: tuple[str, ...] = ("q_proj", "v_proj")  # projections, of ATTENTION and FEED_FORWARD
    layers: tuple[int, ...] | None = None  # which layers, from 0; None = all

    @property
    def scale(self) -> float:
        """Factor on the adapters' output."""
        return self.alpha / self.rank

    @pydantic.field_validator("targets")
    @classmethod
    def _ordered(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        known = (*ATTENTION, *FEED_FORWARD)
        if not targets or not set(targets) <= set(known) or len(set(targets)) < len(targets):
            raise ValueError(f"lora: targets={list(targets)} must be different ones of {', '.join(known)}")
        return tuple(sorted(targets, key=known.index))  # the order of names does not matter


class LoraTransformerConfig(TransformerConfig):
    """Shape of a decoder with adapters."""

    lora: LoraConfig

    @pydantic.model_validator(mode="after")
    def _check_lora(self) -> LoraTransformerConfig:
        chosen = self.lora.layers
        if chosen is not None and (
            not chosen or len(set(chosen)) < len(chosen) or not all(0 <= i < self.num_layers for i in chosen)
        ):
            raise ValueError(f"lora: layers={list(chosen)} must be different layers from 0 to {self.num_layers - 1}")
        if "gate_proj" in self.lora.targets and not self.is_gated:
            raise ValueError(f"lora: targets={list(self.lora.targets)}: activation={self.activation} has no gate_proj")
        return self

    def has_adapter(self, index: int) -> bool:
        """True where the layer of this index has adapters."""
        return self.lora.layers is None or index in self.lora.layers

    @property
    def layer_kind(self) -> str:
        """Kind of the layers with adapters."""
        return "lora"

    def layer_counts(self) -> dict[int, int]:
        """Number of layers with adapters and without, keyed by the index of one of them."""
        chosen = [i for i in range(self.num_layers) if self.has_adapter(i)]
        others = [i for i in range(self.num_layers) if not self.has_adapter(i)]
        return {each[0]: len(each) for each in (chosen, others) if each}

    def layer_shapes(self, index: int, plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Parameter shapes of a layer, including its adapters'."""
        return plain | (self.adapter_shapes(plain) if self.has_adapter(index) else {})

    def adapter_shapes(self, plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's adapters, keyed by name within it."""
        found = {}
        for target in self.lora.targets:
            name = f"{'attention' if target in ATTENTION else 'mlp'}.{target}"
            wide, narrow = plain[f"{name}.kernel"], self.lora.rank
            found |= {f"{name}.lora_a.kernel": (wide[0], narrow), f"{name}.lora_b.kernel": (narrow, wide[1])}
        return found

    def own_params(self, seed: int, *, distinct: bool, std: float) -> dict[str, np.ndarray]:
        """Initial values: A uniform within 1 / sqrt(in), as in PEFT, B zero: the decoder's function is unchanged."""
        from jaxbench import initial

        shapes, params = initial.parameter_shapes(self), {}
        for name, shape in shapes.items():
            if ".lora_" not in name:
                continue
            if name.endswith("lora_b.kernel") and not distinct:
                params[name] = np.zeros(shape)
                continue
            words = philox.words(seed, step=0, site=name, rows=np.zeros(1), num_elements=math.prod(shape))
            params[name] = (2 * philox.uniform(words).reshape(shape) - 1) / math.sqrt(shape[0])
        return params


def with_lora(model: TransformerConfig, lora: LoraConfig | None) -> TransformerConfig:
    """Add adapters to a decoder's configuration; lora=None leaves it as it is.

    Raises:
      ValueError: the adapters do not fit the decoder, or its layers are of another kind already.
    """
    if lora is None:
        return model
    if model.layer_kind is not None:
        raise ValueError(f"lora: layers of kind {model.layer_kind!r} have no adapters")
    try:
        return LoraTransformerConfig(**model.model_dump(), lora=lora)
    except pydantic.ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors(include_url=False)]
        raise ValueError("; ".join(problems)) from error


def plain(config: LoraTransformerConfig) -> TransformerConfig:
    """Configuration of the decoder without its adapters."""
    return TransformerConfig(**{name: getattr(config, name) for name in TransformerConfig.model_fields})


def merged(config: LoraTransformerConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of the plain decoder that computes the same: adapters are multiplied out and added to kernels."""
    found = {name: value for name, value in params.items() if ".lora_" not in name}
    for name in params:
        if name.endswith(".lora_a.kernel"):
            place = name.removesuffix(".lora_a.kernel")
            added = params[name].astype(np.float64) @ params[f"{place}.lora_b.kernel"].astype(np.float64)
            kernel = found[f"{place}.kernel"]
            found[f"{place}.kernel"] = (kernel + config.lora.scale * added).astype(kernel.dtype)
    return found
