"""Inputs, parameters and batches of the neural detector; evidence has one scale for all schemes (S file).

For every scheme, evidence e lies in (0, 1), is larger the more a token looks marked, and has mean 1/2 in unmarked text:

    green-list schemes  1 - gamma/2 if green, (1 - gamma)/2 if red: midpoint of the uniform range that the colour leaves
    dip                 the same with gamma = 1/2
    gumbel              uniform of the word; with two keys, of the first key's word
    synthid             Phi(z), z = standardised weighted sum of the word's bits

So a detector trained on some schemes can be applied to others. F = 3 numbers per token (`FEATURES`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field

from jaxbench import initial, outputs, philox
from jaxbench.config import Base
from jaxbench.pretrained import assets
from jaxbench.watermark.config import Count
from jaxbench.watermark.reference import Evidence
from jaxbench.watermark.schemes.contract import Scheme

FEATURES = 3  # centred evidence, its exponential score, whether the token is scored
NO_EVIDENCE = 0.5  # for a token that is not scored
SMALLEST = 2.0**-24  # evidence stays this far from 0 and 1: float32 has no number between 1 - 2**-24 and 1


class NeuralConfig(Base):
    """Shape of the neural detector."""

    num_rows: int = Field(
        default=4096, ge=2, le=2**24
    )  # rows of the token table; half of them serve one token each, the others are shared
    d_model: int = Field(default=32, ge=1, le=2**14)  # width of a token's vector
    dilations: tuple[Count, ...] = (1, 2, 4)  # distance in tokens between a convolution's three taps, per layer
    num_pooled: int = Field(default=16, ge=1, le=2**14)  # numbers per token that enter the pooling
    d_hidden: int = Field(default=32, ge=1, le=2**14)  # width of the layer after the pooling
    norm_eps: float = Field(default=1e-5, gt=0)


class Arrays(NamedTuple):
    """One batch in numpy; the fields of a backend's Batch."""

    tokens: np.ndarray  # int32 [B T], -1 = padding
    evidence: np.ndarray  # float [B T], in (0, 1)
    scored: np.ndarray  # bool [B T], True where the evidence counts
    labels: np.ndarray  # float [B], 1 = marked

    @property
    def positions(self) -> np.ndarray:
        """Place of each token in its row [B T], -1 = padding."""
        place = np.broadcast_to(np.arange(self.tokens.shape[1]), self.tokens.shape)
        return np.where(self.tokens >= 0, place, -1)


def evidence(scheme: Scheme, found: Evidence) -> Float[np.ndarray, "B T"]:
    """Convert the result of `reference.evidence` or of a Detector to evidence e; 1/2 where not scored."""
    value = scheme.neural_evidence(found.words)
    return np.where(found.scored, np.clip(value, SMALLEST, 1.0 - SMALLEST), NO_EVIDENCE)


# Parameters


def parameter_shapes(config: NeuralConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its dotted name; kernels are (in, out)."""
    c = config
    linear = {"evidence": (FEATURES, c.d_model)}
    linear |= {f"layers.{i}.conv": (3 * c.d_model, c.d_model) for i in range(len(c.dilations))}
    linear |= {"pool": (c.d_model, c.num_pooled), "hidden": (3 * c.num_pooled, c.d_hidden), "head": (c.d_hidden, 1)}
    shapes: dict[str, tuple[int, ...]] = {"embed.embedding": (c.num_rows, c.d_model)}
    shapes |= {f"layers.{i}.norm.scale": (c.d_model,) for i in range(len(c.dilations))}
    for name, shape in linear.items():
        shapes |= {f"{name}.kernel": shape, f"{name}.bias": shape[1:]}
    return shapes


def initial_params(config: NeuralConfig, seed: int, *, distinct: bool = False) -> dict[str, np.ndarray]:
    """Float64 initial values by name, drawn from Philox with the parameter's name as site.

    Kernels have variance 1 / fan-in, the token table standard deviation 0.1, scales are 1 and biases 0; with
    distinct=True these two are random as well (standard deviation 0.1), so that a test notices swapped ones.
    """
    params = {}
    for name, shape in parameter_shapes(config).items():
        kind = name.rsplit(".", 1)[1]
        noise = philox.normal(seed, step=0, site=name, num_elements=int(np.prod(shape))).reshape(shape)
        width = {"kernel": shape[0] ** -0.5, "embedding": 0.1}.get(kind, 0.1 * distinct)
        params[name] = (kind == "scale") + width * noise
    return params


def parity_arrays(config: NeuralConfig, *, batch: int, length: int, seed: int, step: int) -> Arrays:
    """Random data of one step for the parity engine: in every second row, the last quarter is padding."""
    random = np.random.default_rng((seed, step))
    tokens = random.integers(0, 4 * config.num_rows, (batch, length), dtype=np.int32)
    tokens[1::2, length - length // 4 :] = -1
    scored = (tokens >= 0) & (random.random(tokens.shape) < 0.8)
    labels = (np.arange(batch) % 2).astype(np.float64)
    value = random.random(tokens.shape) ** np.where(labels, 0.5, 1.0)[:, None]  # higher in marked rows
    return Arrays(tokens, np.where(scored, value, NO_EVIDENCE), scored, labels)


# Trained detectors on disk


def save(
    folder: str | Path,
    config: NeuralConfig,
    params: Mapping[str, np.ndarray],
    record: Mapping[str, Any],
    calibration: np.ndarray | None = None,
) -> Path:
    """Write detector.safetensors, detector.json (shape, record, checksum), calibration.npy (human passages)."""
    folder = Path(folder)
    initial.check_params(parameter_shapes(config), params)
    weights = folder / "detector.safetensors"
    outputs.save_tensors(weights, {name: np.ascontiguousarray(value, np.float32) for name, value in params.items()})
    if calibration is not None:
        with outputs.whole(folder / "calibration.npy") as temporary, open(temporary, "wb") as file:
            np.save(file, calibration)
    values = {"config": config.model_dump(mode="json"), "sha256": assets.sha256_file(weights), **record}
    outputs.write_json(folder / "detector.json", values)
    return weights


def load(folder: str | Path) -> tuple[NeuralConfig, dict[str, np.ndarray], dict[str, Any]]:
    """Load the shape, parameters and record of a detector that `save` wrote.

    Raises:
      ValueError: a file is missing or damaged, the checksum differs, or parameters are missing, unused or misshapen.
    """
    import safetensors
    from safetensors.numpy import load_file

    path = Path(folder) / "detector.safetensors"
    try:
        record = json.loads((Path(folder) / "detector.json").read_text(encoding="utf-8"))
        config, wanted = NeuralConfig.model_validate(record["config"]), record["sha256"]
        found = assets.sha256_file(path)
        if found != wanted:
            raise ValueError(f"detector: {path} has sha256 {found}, its record says {wanted}; train or copy it again")
        params = load_file(path)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, safetensors.SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"detector: {folder} cannot be read ({reason}); run train-detector first") from error
    initial.check_params(parameter_shapes(config), params)
    return config, params, record


def calibration_file(folder: str | Path) -> Path:
    """Return the path of a detector's human passages.

    Raises:
      ValueError: there is no such file.
    """
    path = Path(folder) / "calibration.npy"
    if not path.is_file():
        raise ValueError(f"detector: {path} cannot be read (there is no such file); run train-detector")
    return path


def load_calibration(folder: str | Path) -> np.ndarray:
    """Load the human passages [N T] that were saved with a detector.

    Raises:
      ValueError: there are none, or the file is damaged.
    """
    path = calibration_file(folder)
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"detector: {path} cannot be read ({error}); run train-detector") from error
    if found.ndim != 2 or not len(found) or found.dtype.kind not in "iu":
        raise ValueError(f"detector: {path} has shape {found.shape} of {found.dtype}, wanted ids [N T]")
    return found
