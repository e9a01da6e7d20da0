"""Arms on the native kernels: Flax, Equinox and PyTorch with packed weights (jaxbench/native).

There are two kinds. `flax_native` and its like have weights of the row's type, as every other arm: in float32 rows
everything is float32; in bfloat16 rows weights, operands of products and cache are bfloat16. `flax_file` and its like
use the weights as stored in the model's own GGUF file and are listed in the float32 rows, next to llama.cpp, which uses
the same; `flax_int8` has weights that jaxbench rounds and is listed there too.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxbench.bench.arms import jax_arms, torch_arms
from jaxbench.measure.records import Workload


class NativeArm:
    """Mixin shared by the arms of all backends; it precedes the backend's own class in the bases."""

    native = ""  # module that builds the decoder
    weights: str | None = None  # format of the weights; None = the row's type
    activations: str | None = None  # None = the row's type
    cache: str | None = None

    def start(self) -> str:
        """Import the backend, and build the kernels if they are not in the cache."""
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
        """Read and pack the weights, unless this arm skips the rows."""
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
        """Compile if the backend does, or return why this arm skips the workload."""
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
    """Flax with the file's own weights, float32 activations, and a bfloat16 cache, as llama.cpp's has 16 bits."""

    name, weights, activations, cache = "flax_file", "file", "float32", "bfloat16"


class FlaxFileInt8Arm(FlaxFileArm):
    """FlaxFileArm with 8-bit activations, as llama.cpp computes."""

    name, activations = "flax_file_int8", "int8"


class FlaxInt8Arm(FlaxNativeArm):
    """Flax with weights that jaxbench rounds to 8 bits, one scale per output, and 8-bit activations."""

    name, weights, activations, cache = "flax_int8", "int8", "int8", "bfloat16"


class TorchFileArm(TorchNativeArm):
    """PyTorch with the file's own weights."""

    name, weights, activations, cache = "torch_file", "file", "float32", "bfloat16"
