"""Arms on the native kernels: Flax, Equinox and PyTorch with packed weights (jaxbench/native).

Two kinds. `flax_native` and its like have the weights of the row's type, as every other arm: in float32 rows
everything is float32, in bfloat16 rows weights, products' operands and cache are bfloat16. `flax_file` and its like
have the numbers of the model's own GGUF file and stand in the float32 rows, beside llama.cpp, which has the same;
`flax_int8` has weights rounded here and stands there too.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxbench.bench.arms import jax_arms, torch_arms
from jaxbench.measure.records import Workload


class NativeArm:
    """What the arms of all backends share; goes before the backend's own class."""

    native = ""  # module that builds the decoder
    weights: str | None = None  # format of the weights; None = the row's type
    activations: str | None = None  # None = the row's type
    cache: str | None = None

    def start(self) -> str:
        """Import the backend, and build the kernels where they are not in the cache."""
        reason = super().start()
        if reason or self.device != "cpu":
            return reason or "native kernels run on CPUs"
        from jaxbench.native import build, library

        try:
            library.load()
        except build.NotAvailable as error:
            return str(error)
        return ""

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Read and pack the weights."""
        from jaxbench.native import checkpoint

        self.dtype = dtype
        self._drop()
        if train is not None or (self.weights and dtype != "float32"):
            return
        source = self.file if self.weights else self.checkpoint
        packed = checkpoint.load(source, weights_as=self.weights or dtype)
        self.weight_bytes = packed.weight_bytes
        build = importlib.import_module(self.native).build
        self.model = build(
            packed, cache_dtype=self.cache or dtype, activations=self.activations or dtype, threads=self.threads
        )
        self.generator = self.sample.Generator(self.model, eos_id=None, sampling=self.sample.SamplingParams())
        self.synchronize()

    def prepare(self, workload: Workload) -> dict:
        """Compile, where the backend does; say which rows this arm has no part in."""
        if workload.kind == "train":
            return {"skip": "native kernels have no train step"}
        if self.weights and workload.dtype != "float32":
            return {"skip": f"has the file's own weights, listed under float32, not {workload.dtype}"}
        return {**super().prepare(workload), "weight_bytes": self.weight_bytes}

    def logits(self, tokens: list[int]) -> Float[np.ndarray, " V"]:
        """Logits of the token after one row."""
        row = np.asarray([tokens], np.int32)
        hidden, _ = self.model.features(*self._arrays(row, np.arange(row.shape[1], dtype=np.int32)[None]))
        return np.asarray(self.model.logits(hidden[:, -1:])[0, -1], np.float32)

    def _arrays(self, *arrays: np.ndarray) -> tuple[Any, ...]:
        return arrays


class FlaxNativeArm(NativeArm, jax_arms.FlaxArm):
    """Flax NNX on native kernels."""

    name, native = "flax_native", "jaxbench.native.model"


class EquinoxNativeArm(NativeArm, jax_arms.EquinoxArm):
    """Equinox on native kernels."""

    name, native = "equinox_native", "jaxbench.eqx.native.model"


class TorchNativeArm(NativeArm, torch_arms.PlainArm):
    """PyTorch on native kernels."""

    name, native = "torch_native", "torch_ref.native.model"

    def _arrays(self, *arrays: np.ndarray) -> tuple[Any, ...]:
        return tuple(map(self.torch.from_numpy, arrays))


class FlaxFileArm(FlaxNativeArm):
    """The file's own numbers, float32 activations, cache in bfloat16: llama.cpp's is in 16 bits."""

    name, weights, activations, cache = "flax_file", "file", "float32", "bfloat16"


class FlaxFileInt8Arm(FlaxFileArm):
    """The same with activations in 8 bits, as llama.cpp computes."""

    name, activations = "flax_file_int8", "int8"


class FlaxInt8Arm(FlaxNativeArm):
    """Weights rounded here to 8 bits, a scale an output, activations in 8 bits."""

    name, weights, activations, cache = "flax_int8", "int8", "int8", "bfloat16"


class TorchFileArm(TorchNativeArm):
    """The file's own numbers in PyTorch."""

    name, weights, activations, cache = "torch_file", "file", "float32", "bfloat16"
