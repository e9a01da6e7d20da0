"""Configuration models shared by every workload (S file: neither JAX nor PyTorch).

A configuration is a frozen pydantic model read from YAML. An unknown key is an error that names the file, the key and
the nearest known key. Library functions take the fields they use, never a whole configuration.
"""

from __future__ import annotations

from typing import Literal

import pydantic


class Base(pydantic.BaseModel):
    """A frozen configuration that rejects unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class RotaryScaling(Base):
    """How rotary frequencies are stretched past the trained context.

    Sources: linear, Chen et al. 2023, arXiv:2306.15595; llama3, Llama 3.1 reference implementation.
    """

    kind: Literal["linear", "llama3"]
    factor: float = pydantic.Field(gt=0)  # how many times longer the context becomes, > 0
    low_freq_factor: float = 1.0  # llama3 only: wavelengths above original / low are divided by factor
    high_freq_factor: float = 4.0  # llama3 only: wavelengths below original / high are kept
    original_max_seq_len: int = pydantic.Field(default=8192, gt=0)  # llama3 only: trained context, tokens


class TransformerConfig(Base):
    """Shape of a decoder of the Llama or GPT-2 family."""

    vocab_size: int = pydantic.Field(gt=0)  # tokens
    d_model: int = pydantic.Field(gt=0)  # residual width
    d_ff: int = pydantic.Field(gt=0)  # feed-forward width
    num_layers: int = pydantic.Field(gt=0)
    num_heads: int = pydantic.Field(gt=0)  # query heads
    num_kv_heads: int = pydantic.Field(gt=0)  # key-value heads; divides num_heads
    head_dim: int = pydantic.Field(gt=0)  # width of one head
    max_seq_len: int = pydantic.Field(gt=0)  # trained context, tokens
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = pydantic.Field(default=1e-5, gt=0)
    activation: Literal["swiglu", "gelu"] = "swiglu"  # gelu is the tanh approximation of GPT-2
    position: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = pydantic.Field(default=10000.0, gt=0)  # rotary base wavelength parameter
    rope_scaling: RotaryScaling | None = None
    use_bias: bool = False  # biases on every projection
    tie_embeddings: bool = True  # logits from the transposed embedding
    sliding_window: int | None = pydantic.Field(default=None, gt=0)  # tokens a query sees, itself included
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)  # probability of dropping a residual branch's value

    @pydantic.model_validator(mode="after")
    def _check_shapes(self) -> TransformerConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.position == "rotary" and self.head_dim % 2:
            raise ValueError(f"model: rotary positions need an even head_dim, got head_dim={self.head_dim}")
        return self
