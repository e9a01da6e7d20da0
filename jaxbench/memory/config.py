"""Configuration of the neural memory: parameter shapes, initial values and parity batches (S file).

docs/memory.md derives the formulas. Defaults are those of Titans (Behrouz et al. 2024, arXiv:2501.00663) where the
paper gives any.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from jaxbench import initial, philox
from jaxbench.config import Base


class NeuralMemoryConfig(Base):
    """Shape of a neural memory: a small network whose weights are trained, token by token, on what it reads."""

    d_model: int = Field(gt=0)  # width of the residual stream that it reads from and adds to
    num_heads: int = Field(gt=0)  # parallel memories
    head_dim: int = Field(gt=0)  # width of keys, values and queries of one memory
    chunk_size: int = Field(default=64, gt=0)  # tokens whose gradients are taken at the same weights; 1 = recurrence
    depth: int = Field(default=2, ge=0, le=4)  # layers of the network; 1 = a matrix; 0 = none: queries are the read-out
    hidden_factor: int = Field(default=2, gt=0)  # width of its hidden layers / head_dim
    activation: Literal["gelu", "gelu_erf", "silu"] = "gelu"  # between layers; gelu is the tanh approximation
    residual_norm: bool = False  # M(x) = LayerNorm(network(x)) (1 + gain) + x, of Sun et al. 2024; the paper is silent
    loss_reduction: Literal["sum", "mean"] = "sum"  # over the head's width; mean acts as a learning rate / head_dim
    read: Literal["token", "before", "chunk"] = "token"  # token t is read out at M_t, M_(t-1), M before its chunk
    momentum: bool = True  # False: eta = 0
    forgetting: bool = True  # False: alpha = 0
    max_theta: float = Field(default=1.0, gt=0)  # theta lies in (0, max_theta)
    max_update_norm: float | None = Field(default=None, gt=0)  # clips a token's gradient per head; None = no clipping
    conv_size: int = Field(default=4, ge=1)  # taps of the depthwise convolutions of q, k and v; 1 = none
    qkv_activation: Literal["silu", "none"] = "silu"
    qk_norm: bool = True  # queries and keys are normalised to length 1
    output: Literal["gated", "linear"] = "gated"  # gated = RMSNorm of each head, times SiLU of a projection of x
    num_persistent: int = Field(default=0, ge=0)  # learned tokens read before every sequence
    norm_eps: float = Field(default=1e-5, gt=0)
    initial_eta: float = Field(default=0.5, gt=0, lt=1)  # decay of momentum where the gate's projection is 0
    initial_theta: float = Field(default=0.005, gt=0)  # inner learning rate there; below max_theta
    initial_alpha: float = Field(default=0.01, gt=0, lt=1)  # decay of the weights at each token there
    initial_match: bool = False  # key projection starts as the query's, so that a query finds similar keys

    @pydantic.model_validator(mode="after")
    def _check(self) -> NeuralMemoryConfig:
        if self.initial_theta >= self.max_theta:
            raise ValueError(
                f"memory: initial_theta={self.initial_theta} is not below max_theta={self.max_theta}, its upper limit"
            )
        if not self.depth and (self.residual_norm or self.num_persistent):
            raise ValueError(
                f"memory: depth=0 has no network to normalise or to learn from persistent tokens: wanted "
                f"residual_norm=false and num_persistent=0, got {str(self.residual_norm).lower()} and "
                f"{self.num_persistent}"
            )
        return self

    @property
    def streams(self) -> str:
        """Projections by letter: queries, keys and values; without a network, queries only."""
        return "qkv" if self.depth else "q"

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the network's layers, input first; () without a network."""
        hidden = (self.depth - 1) * (self.hidden_factor * self.head_dim,)
        return (self.head_dim, *hidden, self.head_dim) if self.depth else ()


def parameter_shapes(config: NeuralMemoryConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a neural memory's parameters by dotted name; kernels are (in, out)."""
    c, width = config, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.kernel": (c.d_model, width) for x in c.streams}
    if c.conv_size > 1:
        shapes |= {f"{x}_conv.kernel": (c.conv_size, width) for x in c.streams}
    for gate in gate_names(c):
        shapes |= {f"{gate}.kernel": (c.d_model, c.num_heads), f"{gate}.bias": (c.num_heads,)}
    pairs = zip(c.widths, c.widths[1:])
    shapes |= {f"memory.layers.{i}.kernel": (c.num_heads, *pair) for i, pair in enumerate(pairs)}
    if c.residual_norm:
        shapes["memory.gain"] = (c.num_heads, c.head_dim)
    if c.output == "gated":
        shapes |= {"out_norm.scale": (c.head_dim,), "g_proj.kernel": (c.d_model, width)}
    if c.num_persistent:
        shapes["persistent"] = (c.num_persistent, c.d_model)
    shapes["o_proj.kernel"] = (width, c.d_model)
    return shapes


def gate_names(config: NeuralMemoryConfig) -> tuple[str, ...]:
    """Names of the gates that a configuration has, of eta, theta and alpha; none without a network."""
    used = {"eta": config.momentum, "theta": True, "alpha": config.forgetting}
    return tuple(name for name, is_used in used.items() if is_used and config.depth)


def initial_params(
    config: NeuralMemoryConfig, seed: int, *, distinct: bool = False, std: float = initial.STANDARD_DEVIATION
) -> dict[str, np.ndarray]:
    """Initial values in float64 by name, drawn from Philox with the parameter's name as site.

    Projections are normal with standard deviation std, the network's kernels with fan-in scaling, persistent tokens
    with 1, like the normalised stream that they join; convolutions start as the identity, gates at the
    configured values. With initial_match the key projection equals the query projection, and the key convolution is
    the mean of its tokens. With distinct=True every tensor is random, so that a swapped or ignored one shows.
    """
    params = {}
    for name, shape in parameter_shapes(config).items():
        noise = philox.normal(seed, step=0, site=name, num_elements=math.prod(shape)).reshape(shape)
        centre, spread = _distribution(config, name, shape, std)
        params[name] = centre + (max(spread, 0.1) if distinct else spread) * noise
    if config.initial_match and config.depth and not distinct:
        params["k_proj.kernel"] = params["q_proj.kernel"].copy()
        if config.conv_size > 1:
            params["k_conv.kernel"] = np.full_like(params["k_conv.kernel"], 1.0 / config.conv_size)
    return params


def _distribution(
    config: NeuralMemoryConfig, name: str, shape: tuple[int, ...], std: float
) -> tuple[float | np.ndarray, float]:
    """Mean and standard deviation of a parameter's initial values."""
    module, _, kind = name.rpartition(".")
    if module.startswith("memory.layers"):
        return 0.0, shape[1] ** -0.5
    if module.endswith("_conv"):
        return np.eye(1, shape[0], shape[0] - 1).T * np.ones(shape), 0.0
    if kind == "scale":
        return 1.0, 0.0
    if kind == "bias":
        share = {"eta": config.initial_eta, "alpha": config.initial_alpha}.get(module)
        share = config.initial_theta / config.max_theta if share is None else share
        return math.log(share / (1.0 - share)), 0.0
    fixed = {"gain": 0.0, "persistent": 1.0}
    return 0.0, fixed.get(kind, std)


class Arrays(NamedTuple):
    """One parity batch in numpy; the fields of a backend's Batch."""

    x: np.ndarray  # float [B T D]
    target: np.ndarray  # float [B T D]
    is_token: np.ndarray | None  # bool [B T]; None = no padding

    @property
    def positions(self) -> np.ndarray:
        """Position of each token in its row, int [B T], -1 = padding."""
        shape = self.x.shape[:2]
        is_token = np.ones(shape, bool) if self.is_token is None else self.is_token
        return np.where(is_token, np.cumsum(is_token, axis=1) - 1, -1)


def parity_arrays(config: NeuralMemoryConfig, *, batch: int, length: int, seed: int, step: int) -> Arrays:
    """Random data of one step of a parity case; with an odd seed every second row starts with padding."""
    random = np.random.default_rng((seed, step))
    x, target = random.standard_normal((2, batch, length, config.d_model))
    is_token = None
    if seed % 2:
        is_token = np.ones((batch, length), bool)
        is_token[1::2, : length // 4] = False
    return Arrays(x, target, is_token)
