"""Run a reader's exported programs: ONNX by ONNX Runtime, StableHLO by JAX.

A folder has scores.onnx, surprise.onnx and scores.onnx.data, or scores.stablehlo, surprise.stablehlo and
weights.safetensors. Every program takes the arrays of INPUTS in that order, `surprise` all but the last. A StableHLO
program takes the weights before them, sorted by name; both ONNX files refer to theirs in scores.onnx.data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WEIGHTS = "weights.safetensors"
ONNX = {"scores": "scores.onnx", "surprise": "surprise.onnx"}
STABLEHLO = {"scores": "scores.stablehlo", "surprise": "surprise.stablehlo"}
INPUTS = (
    "tokens", "positions", "is_context", "num_attended", "response_tokens", "targets", "response_positions",
    "segments", "is_generated", "slots",
)  # fmt: skip
SCORES = ("external", "context_mass", "lookback", "parametric", "loss", "entropy", "states")
SURPRISE = ("loss", "entropy")  # what `surprise` computes, from all inputs but slots
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")  # of ONNX Runtime, in order of preference
Program = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


class Programs(NamedTuple):
    """A reader's two programs, for one response to one prompt."""

    scores: Program  # arrays of INPUTS -> arrays of SCORES
    surprise: Program  # the same arrays without slots -> arrays of SURPRISE


def specs(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Type and sizes of arrays by name, such as int32[1,64]."""
    return {name: _spec(array.dtype, array.shape) for name, array in arrays.items()}


def _spec(dtype: Any, shape: Iterable[int]) -> str:
    return f"{np.dtype(dtype)}[{','.join(map(str, shape))}]"


def load_onnx(folder: Path, example: Mapping[str, np.ndarray]) -> Programs:
    """Load programs in ONNX Runtime, on a GPU if it has one.

    example: arrays of INPUTS, of the sizes that the programs must take.

    Raises:
      ValueError: ONNX Runtime is not installed, or a file is missing, damaged or of other sizes.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"detector: {folder} needs ONNX Runtime ({error}); pip install -e '.[export]'") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    # ONNX Runtime ignores OMP_NUM_THREADS: a number, or several for nested regions. 0 = all cores
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    options.intra_op_num_threads = int(threads) if threads.isdecimal() else 0
    providers = [name for name in PROVIDERS if name in onnxruntime.get_available_providers()]
    types = {"tensor(int32)": "int32", "tensor(bool)": "bool"}

    def load(file: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Program:
        try:
            session = onnxruntime.InferenceSession(str(folder / file), options, providers=providers)
        except Exception as error:  # it raises its own types
            raise ValueError(f"detector: {folder / file} cannot be read ({_reason(error)})") from error
        takes = {
            one.name: f"{types.get(one.type, one.type)}{one.shape}".replace(" ", "") for one in session.get_inputs()
        }
        _check(takes, {name: example[name] for name in inputs}, folder / file)

        def call(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return dict(zip(outputs, session.run(outputs, {name: arrays[name] for name in inputs}), strict=True))

        return call

    return Programs(load(ONNX["scores"], INPUTS, SCORES), load(ONNX["surprise"], INPUTS[:-1], SURPRISE))


def load_stablehlo(folder: Path, example: Mapping[str, np.ndarray]) -> Programs:
    """Load programs in JAX, on whatever device it has.

    example: arrays of INPUTS, of the sizes that the programs must take.

    Raises:
      ValueError: a file is missing, damaged or of other sizes.
    """
    import jax
    from jax import export
    from safetensors.numpy import load_file

    try:
        weights = jax.device_put(load_file(folder / WEIGHTS))
        read = {name: export.deserialize((folder / file).read_bytes()) for name, file in STABLEHLO.items()}
    except Exception as error:  # each library raises its own types
        raise ValueError(f"detector: the programs in {folder} cannot be read ({_reason(error)})") from error
    calls = {}
    for name, outputs, program in (("scores", SCORES, read["scores"]), ("surprise", SURPRISE, read["surprise"])):
        inputs = INPUTS[: len(program.in_avals) - len(weights)]
        avals = [_spec(each.dtype, each.shape) for each in program.in_avals]
        _check(dict(zip([*sorted(weights), *inputs], avals)), weights | {k: example[k] for k in inputs}, folder)
        calls[name] = _called(jax, program, weights, inputs, outputs)
    return Programs(**calls)


def _called(jax: Any, program: Any, weights: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Program:
    run = jax.jit(program.call)

    def call(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(outputs, jax.device_get(run(weights, *(arrays[name] for name in inputs))), strict=True))

    return call


def _check(found: Mapping[str, str], wanted: Mapping[str, np.ndarray], place: Path) -> None:
    expected = specs(wanted)
    wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if wrong:
        takes, says = found.get(wrong[0]), expected.get(wrong[0])
        raise ValueError(f"detector: {place} takes {wrong[0]} as {takes}, and its folder says {says}; export it again")


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
