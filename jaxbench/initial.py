"""Parameter shapes and initial values of the decoder, equal for every backend (S file)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jaxbench import philox
from jaxbench.config import TransformerConfig

STANDARD_DEVIATION = 0.02  # GPT-2's initialisation, Radford et al. 2019, section 2.3


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by dotted name; kernels are (in, out)."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed.embedding": (c.vocab_size, c.d_model)}
    if c.position == "learned":
        shapes["position.embedding"] = (c.max_seq_len, c.d_model)
    plain = _layer_shapes(c)
    for i in range(c.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in c.layer_shapes(i, plain).items()}
    shapes |= _norm_shapes("final_norm", c)
    if not c.tie_embeddings:
        shapes["head.kernel"] = (c.d_model, c.vocab_size)
    return shapes


def num_parameters(config: TransformerConfig) -> int:
    """Number of parameters, without listing the layers: there may be billions."""

    def size(shapes: Mapping[str, tuple[int, ...]]) -> int:
        return sum(math.prod(shape) for shape in shapes.values())

    single, plain = config.model_copy(update={"num_layers": 1}), _layer_shapes(config)
    ends = size(parameter_shapes(single)) - size(single.layer_shapes(0, plain))
    return ends + sum(count * size(config.layer_shapes(i, plain)) for i, count in config.layer_counts().items())


def _norm_shapes(name: str, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    parts = ("scale", "bias") if config.norm == "layernorm" else ("scale",)
    return {f"{name}.{part}": (config.d_model,) for part in parts}


def _layer_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    c = config
    query_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    kernels = {
        "attention.q_proj": (c.d_model, query_width),
        "attention.k_proj": (c.d_model, kv_width),
        "attention.v_proj": (c.d_model, kv_width),
        "attention.o_proj": (query_width, c.d_model),
        "mlp.up_proj": (c.d_model, c.d_ff),
        "mlp.down_proj": (c.d_ff, c.d_model),
    }
    if c.is_gated:
        kernels["mlp.gate_proj"] = (c.d_model, c.d_ff)
    shapes = _norm_shapes("attention_norm", c) | _norm_shapes("mlp_norm", c)
    if c.post_norms:
        shapes |= _norm_shapes("attention_post_norm", c) | _norm_shapes("mlp_post_norm", c)
    for name, shape in kernels.items():
        shapes[f"{name}.kernel"] = shape
        if c.use_bias or (c.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj"))):
            shapes[f"{name}.bias"] = shape[1:]
    if c.qk_norm:
        shapes |= {f"attention.{x}_norm.scale": (c.head_dim,) for x in "qk"}
    return shapes


def initial_params(
    config: TransformerConfig, seed: int, *, distinct: bool = False, std: float = STANDARD_DEVIATION
) -> dict[str, np.ndarray]:
    """Initial values by dotted name, float64, drawn from Philox with the parameter's name as site.

    Kernels and embeddings are normal with standard deviation std, scales 1, biases 0. With distinct=True every tensor
    is random (scales 1 +- 0.1, biases +- 0.1, kernels five times wider), so that a swapped or ignored one shows.
    Parameters that only a workload's layers have come from the configuration (`own_params`).
    """
    params = config.own_params(seed, distinct=distinct, std=std)
    for name, shape in parameter_shapes(config).items():
        if name in params:
            continue
        kind = name.rsplit(".", 1)[1]
        if kind in ("scale", "bias") and not distinct:
            params[name] = np.full(shape, 1.0 if kind == "scale" else 0.0)
            continue
        noise = philox.normal(seed, step=0, site=name, num_elements=int(np.prod(shape))).reshape(shape)
        if kind == "scale":
            params[name] = 1.0 + 0.1 * noise
        elif kind == "bias":
            params[name] = 0.1 * noise
        else:
            params[name] = (5 if distinct else 1) * std * noise
    return params


def inserted(config: TransformerConfig, params: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Parameters of a decoder with a workload's layers: the plain decoder's, and initial values of those layers' own.

    Parameters that these layers no longer have are dropped.
    """
    wanted, own = parameter_shapes(config), config.own_params(seed, distinct=False, std=STANDARD_DEVIATION)
    return {name: value for name, value in params.items() if name in wanted} | own


def check_params(expected: Mapping[str, tuple[int, ...]], params: Mapping[str, np.ndarray]) -> None:
    """Check that parameters have exactly the expected names and shapes.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    missing, unused, misshapen = mismatches(expected, {name: value.shape for name, value in params.items()}).values()
    if missing or unused or misshapen:
        raise ValueError(
            f"parameters do not fit: missing {sorted(missing)}, unused {sorted(unused)}, misshapen {misshapen}"
        )


def mismatches(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Names of tensors that are missing, unused, or of another shape, by kind."""
    return {
        "missing": [name for name in wanted if name not in found],
        "unused": [name for name in found if name not in wanted],
        "misshapen": [
            f"{name} is {tuple(found[name])}, wanted {tuple(shape)}"
            for name, shape in wanted.items()
            if name in found and tuple(found[name]) != tuple(shape)
        ],
    }
