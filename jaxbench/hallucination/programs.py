"""A reader's exported programs, run: ONNX by ONNX Runtime, StableHLO by JAX (S file).

A folder has reader.onnx with its weights beside it, or scores.stablehlo, surprise.stablehlo and weights.safetensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ONNX, WEIGHTS = "reader.onnx", "weights.safetensors"
STABLEHLO = {"scores": "scores.stablehlo", "surprise": "surprise.stablehlo"}
SCORES = ("external", "context_mass", "lookback", "parametric", "loss", "entropy", "states")
SURPRISE = ("loss", "entropy")
Program = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


class Programs(NamedTuple):
    """A reader's two programs, of one response behind one prompt."""

    scores: Program  # arrays of portable.Sizes.example -> arrays of SCORES
    surprise: Program  # the same arrays without slots -> arrays of SURPRISE


def load_onnx(folder: Path) -> Programs:
    """Programs by ONNX Runtime, on its default processor: one graph, of which `surprise` runs a part.

    Raises:
      ValueError: ONNX Runtime is not installed, or the file is missing or damaged.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"detector: {folder} is for ONNX Runtime ({error}); install onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(
            str(folder / ONNX), options, providers=onnxruntime.get_available_providers()
        )
    except Exception as error:  # it raises types of its own
        raise ValueError(f"detector: {folder / ONNX} cannot be read ({str(error).splitlines()[0]})") from error
    part = onnxruntime.RunOptions()
    part.only_execute_path_to_fetches = True
    no_slots = np.zeros(session.get_inputs()[-1].shape, np.int32)

    def scores(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(SCORES, session.run(list(SCORES), arrays)))

    def surprise(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(SURPRISE, session.run(list(SURPRISE), arrays | {"slots": no_slots}, part)))

    return Programs(scores, surprise)


def load_stablehlo(folder: Path) -> Programs:
    """Programs by JAX, on whatever device it has.

    Raises:
      ValueError: a file is missing or damaged.
    """
    import jax
    from jax import export
    from safetensors.numpy import load_file

    try:
        held = load_file(folder / WEIGHTS)
        calls = {name: jax.jit(export.deserialize((folder / file).read_bytes()).call) for name, file in STABLEHLO.items()}
    except Exception as error:  # each library raises types of its own
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise ValueError(f"detector: the programs in {folder} cannot be read ({reason})") from error
    weights = jax.device_put([held[name] for name in sorted(held)])

    def scores(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return jax.device_get(calls["scores"](weights, arrays))

    def surprise(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return jax.device_get(calls["surprise"](weights, arrays))

    return Programs(scores, surprise)
