"""Quantise a model's matrices to grids, layer by layer (S file).

Data flow: calibration tokens -> embedding -> for each layer: statistics of its matrices' inputs (backend) -> channels
scaled (equalize.py) -> matrices rounded (grids.py, gptq.py) -> the quantised layer run again; its outputs are the next
layer's inputs. So every layer is calibrated on the inputs that it will get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from jaxbench.config import TransformerConfig
from jaxbench.quantization import equalize, gptq, grids
from jaxbench.quantization.grids import Grid, Quantized
from jaxbench.quantization.recipe import QuantizedModel, Recipe
from jaxbench.quantization.statistics import SOURCES, InputStatistics, static_range

ROWS = 8  # of calibration tokens in one call
Progress = Callable[[int, int], None]  # layers done, total layers


class Calibrator(Protocol):
    """LayerByLayer of jaxbench.quantization.inputs or torch_ref.quantization.inputs."""

    def layer(
        self, index: int, params: Mapping[str, np.ndarray], hidden: Float[np.ndarray, "B T D"], *, histogram: bool
    ) -> tuple[Float[np.ndarray, "B T D"], dict[str, InputStatistics]]:
        """Residual stream after a layer, and statistics of its matrices' inputs."""
        ...


def quantize(
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    recipe: Recipe,
    *,
    calibrator: Calibrator | None = None,
    tokens: Int[np.ndarray, "B T"] | None = None,
    progress: Progress = lambda done, total: None,
) -> QuantizedModel:
    """Quantise a model's matrices to the recipe's grids.

    Args:
      params: float parameters by dotted name.
      calibrator, tokens: decoder and tokens for calibration; required if recipe.needs_calibration.
      progress: called after each layer.

    Raises:
      ValueError: groups do not divide a matrix, calibration is needed and missing or has tokens that the model does not
        know or rows longer than its context, or weights are not finite.
    """
    if recipe.needs_calibration and (calibrator is None or tokens is None or not tokens.size):
        count = 0 if tokens is None else tokens.size
        raise ValueError(f"quantize: rounding={recipe.rounding}, equalize={recipe.equalize}, activations="
                         f"{recipe.activations} need calibration tokens, got {count}")  # fmt: skip
    if config.layer_kind is not None:
        raise ValueError(f"quantize: layers of kind {config.layer_kind!r} are not quantised")
    _check(params, recipe)
    made = QuantizedModel(config, {}, {}, recipe.activations, {}, {})
    if recipe.needs_calibration:
        check_tokens(config, tokens, what="the calibration text")
        hidden = embedded(config, params, tokens)
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        layer = {n.removeprefix(prefix): np.asarray(v) for n, v in params.items() if n.startswith(prefix)}
        found: dict[str, InputStatistics] = {}
        if recipe.needs_calibration:
            needs_histogram = recipe.activations == "static"
            first = needs_histogram and recipe.equalize == "none"
            _, found = _run(calibrator, i, layer, hidden, histogram=first)
            layer = equalize.equalized(layer, config, found, recipe.grid, method=recipe.equalize)
            if recipe.equalize != "none":
                _, found = _run(calibrator, i, layer, hidden, histogram=needs_histogram)
        rounded = _round_layer(layer, recipe, found)
        for name, (matrix, error) in rounded.items():
            made.matrices[prefix + name], made.errors[prefix + name] = matrix, error
            if recipe.activations == "static":
                limit = static_range(found[SOURCES[name]], recipe.activation_scales, type=recipe.type)
                made.input_ranges[prefix + name] = limit
        now = {f"{name}.kernel": grids.dequantized(matrix).T for name, (matrix, _) in rounded.items()}
        made.params.update({prefix + name: value for name, value in layer.items() if name not in now})
        if recipe.needs_calibration and i + 1 < config.num_layers:
            hidden, _ = _run(calibrator, i, layer | now, hidden, histogram=False)
        progress(i + 1, config.num_layers)
    _round_ends(made, params, recipe.embedding_grid)
    return made


def check_tokens(config: TransformerConfig, tokens: Int[np.ndarray, "B T"], *, what: str) -> None:
    """Check that a model can read rows of tokens; `what` names them in errors.

    JAX gives NaN or the last row for an id past the embedding, NumPy takes a negative one from its end.

    Raises:
      ValueError: a token is outside the vocabulary, or rows are longer than the model's context.
    """
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(
            f"quantize: {what} has token ids from {tokens.min()} to {tokens.max()}, wanted 0 to "
            f"{config.vocab_size - 1}: is the tokenizer another model's?"
        )
    if tokens.shape[1] > config.max_seq_len:
        raise ValueError(
            f"quantize: rows of {what} have {tokens.shape[1]} tokens, the model has {config.max_seq_len} positions"
        )


def embedded(
    config: TransformerConfig, params: Mapping[str, np.ndarray], tokens: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T D"]:
    """Residual stream before the first layer, for rows without padding."""
    hidden = np.asarray(params["embed.embedding"], np.float32)[tokens] * np.float32(config.embedding_scale)
    learned = params.get("position.embedding")
    return hidden if learned is None else hidden + np.asarray(learned, np.float32)[: tokens.shape[1]]


def _check(params: Mapping[str, np.ndarray], recipe: Recipe) -> None:
    """Check every matrix before the first is rounded."""
    for name, value in params.items():
        module, _, part = name.rpartition(".")
        grid = recipe.grid if module.startswith("layers.") else recipe.embedding_grid
        if part == "kernel" and grid is not None:
            grids.check(grid, value.shape[0], module)
        elif name == "embed.embedding" and grid is not None:
            grids.check(grid, value.shape[1], module)
        if not np.isfinite(value).all():
            raise ValueError(f"quantize: {name} has NaN or infinite values, {np.isfinite(value).mean():.3%} are finite")


def _run(
    calibrator: Calibrator, index: int, layer: equalize.Layer, hidden: np.ndarray, *, histogram: bool
) -> tuple[np.ndarray, dict[str, InputStatistics]]:
    """Run a layer over all calibration rows, a few at a time."""
    outs, total = [], {}
    for start in range(0, len(hidden), ROWS):
        out, found = calibrator.layer(index, layer, hidden[start : start + ROWS], histogram=histogram)
        outs.append(out)
        total = {name: total[name] + found[name] if total else found[name] for name in found}
    return np.concatenate(outs), total


def _round_layer(
    layer: equalize.Layer, recipe: Recipe, found: Mapping[str, InputStatistics]
) -> dict[str, tuple[Quantized, float]]:
    """Round a layer's matrices to the grid, with their errors; two at a time, because NumPy releases the lock."""

    def work(name: str) -> tuple[Quantized, float]:
        return _round(layer[f"{name}.kernel"].T, recipe, found.get(SOURCES[name]), name)

    names = [name for name in SOURCES if f"{name}.kernel" in layer]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))


def _round(weights: np.ndarray, recipe: Recipe, inputs: InputStatistics | None, name: str) -> tuple[Quantized, float]:
    """Round one matrix to the grid; return it with its error."""
    weights = np.ascontiguousarray(weights, np.float32)
    if inputs is None:
        matrix = grids.nearest(weights, recipe.grid, rule=recipe.scales)
        return matrix, _relative(weights, grids.dequantized(matrix))
    moment = inputs.second_moment
    if recipe.rounding == "gptq":
        matrix = gptq.gptq(weights, moment, recipe.grid, rule=recipe.scales, name=name)
    else:
        matrix = grids.nearest(weights, recipe.grid, rule=recipe.scales, importance=np.diagonal(moment))
    return matrix, gptq.product_error(weights, grids.dequantized(matrix), moment)


def _relative(weights: np.ndarray, rounded: np.ndarray) -> float:
    norm = float(np.linalg.norm(weights))
    return float(np.linalg.norm(rounded - weights)) / norm if norm else 0.0


def _round_ends(made: QuantizedModel, params: Mapping[str, np.ndarray], grid: Grid | None) -> None:
    """Add embedding and head, on their grid or unchanged, and the other parameters outside the layers."""
    for name, value in _outside(params):
        module, _, part = name.rpartition(".")
        if grid is None or (part != "kernel" and name != "embed.embedding"):
            made.params[name] = np.asarray(value)
            continue
        weights = np.asarray(value, np.float32) if name == "embed.embedding" else np.asarray(value, np.float32).T
        made.matrices[module] = grids.nearest(weights, grid, rule="mse")
        made.errors[module] = _relative(weights, grids.dequantized(made.matrices[module]))


def _outside(params: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, value) for name, value in params.items() if not name.startswith("layers."))
