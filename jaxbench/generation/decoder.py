"""Load a model for a backend, with native kernels or with the framework's own programs (S file).

The backends' modules are passed in, so that a command loads only the framework it runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.config import TransformerConfig
from jaxbench.native import checkpoint, library
from jaxbench.native.build import NotAvailable
from jaxbench.pretrained import weights

KERNELS = ("auto", "native", "xla")
XLA_WEIGHTS = ("float32", "bfloat16")
WEIGHTS = checkpoint.WEIGHTS  # of native kernels; XLA_WEIGHTS are among them
CACHES, ACTIVATIONS = checkpoint.CACHE_TYPES, tuple(checkpoint.PLANES)


class Options(NamedTuple):
    """What a command was asked for; None = unset: the kernels' own default is taken."""

    kernels: str = "auto"  # auto: native on CPUs if available | native | xla: the framework's own programs
    weights: str | None = None  # of WEIGHTS; with xla of XLA_WEIGHTS; overrides the dtype of a configuration
    cache: str | None = None  # of CACHES: keys and values, native only
    activations: str | None = None  # of ACTIVATIONS, native only
    threads: int | None = None  # native only: at most this many; 0 = all


class Choice(NamedTuple):
    """Kernels and number types that a run uses."""

    kernels: str  # native or xla
    weights: str
    cache: str | None  # None with xla: the framework's choice
    activations: str | None
    threads: int
    note: str | None = None  # why `auto` did not take native kernels, in one line

    def identity(self) -> dict[str, Any]:
        """Fields that determine the tokens, by name: the number of threads does not."""
        return {"kernels": self.kernels, "weights": self.weights, "cache": self.cache, "activations": self.activations}

    def added(self, dtype: str = XLA_WEIGHTS[0]) -> dict[str, Any]:
        """Part of the identity that a configuration of this number type does not say: nothing if xla computes in it.

        Thus a run with --kernels=xla has the same id as before there were other kernels.
        """
        return {} if (self.kernels, self.weights) == ("xla", dtype) else self.identity()

    def suffix(self, dtype: str = XLA_WEIGHTS[0]) -> str:
        """`added` as a suffix of a configuration's id: "-native-file-float32-float32", or nothing."""
        return "".join(f"-{value}" for value in self.added(dtype).values() if value)


class Backend(NamedTuple):
    """The modules that generate: those of jaxbench, jaxbench.eqx or torch_ref."""

    transformer: types.ModuleType
    sample: types.ModuleType
    native: types.ModuleType | None = None  # needed for native kernels only
    placement: Mapping[str, Any] = {}  # arguments of `transformer.build` for the device, besides the number type
    parallel: types.ModuleType | None = None  # parallel/decoding.py: the decoder is split over `devices`
    devices: Any = None  # as its `attached` returns them
    num_devices: int = 1


class Decoder(NamedTuple):
    """A loaded model, and what to report about it."""

    model: Any
    sample: types.ModuleType
    choice: Choice
    weights: str  # the number types of its matrices, the largest share first
    num_devices: int = 1  # that it is split over


XLA = Choice("xla", XLA_WEIGHTS[0], None, None, 0)  # the default of functions that take a Choice


def choose(
    options: Options,
    device: str,
    *,
    dtype: str = XLA_WEIGHTS[0],
    config: Callable[[], TransformerConfig] | None = None,
    num_devices: int = 1,
) -> Choice:
    """Choose the kernels and number types of a run on a device, or on several together.

    Args:
      dtype: of XLA_WEIGHTS, from the command's configuration if it has one: what xla computes in, and what native
        weights are rounded to if it is narrower than float32.
      config: reads the model's configuration; called if native kernels are available.

    Raises:
      NotAvailable: native kernels are requested but not available; the message says why.
      ValueError: a setting is for other kernels than these, or the weights' format does not fit the model's widths.
    """
    own = checkpoint.FILE if dtype == XLA_WEIGHTS[0] else dtype
    reason = None if options.kernels == "xla" else why_not_native(device, num_devices)
    if options.kernels != "xla" and reason is None and config is not None:
        reason = why_no_block(shape := config())
        if reason is None:
            checkpoint.check_widths(shape, options.weights or own)
    if options.kernels == "native" and reason is not None:
        raise NotAvailable(f"--kernels={options.kernels}: {reason}")
    if options.kernels != "xla" and reason is None:
        cache, activations = options.cache or "float32", options.activations or "float32"
        return Choice("native", options.weights or own, cache, activations, options.threads or 0)
    because = reason or f"--kernels={options.kernels}"
    for name in ("cache", "activations", "threads"):
        if (value := getattr(options, name)) is not None:
            raise ValueError(f"--{name}={value} is for native kernels alone ({because}); leave it out")
    chosen = options.weights or dtype
    if chosen not in XLA_WEIGHTS:
        raise ValueError(
            f"--weights={chosen} is for native kernels alone ({because}); wanted {' or '.join(XLA_WEIGHTS)}"
        )
    return Choice("xla", chosen, None, None, 0, reason and f"kernels: xla, because {reason}")


def why_not_native(device: str, num_devices: int = 1) -> str | None:
    """Why native kernels are not available on a device, in one line; None if they are. The first call builds them."""
    if num_devices > 1:
        return f"native kernels are for one device, and --tensor_parallel={num_devices}"
    if device != "cpu":
        return f"native kernels are for CPUs, and --device={device}"
    try:
        library.load()
    except NotAvailable as error:
        return " ".join(str(error).split())
    return None


def why_no_block(config: TransformerConfig) -> str | None:
    """Why native kernels do not support a model's layers; None if they do."""
    kind = config.layer_kind
    if not config.is_causal:
        return f"native kernels are causal, and the model has is_causal={config.is_causal}"
    return None if kind is None else f"native kernels have no block for the model's layers of kind {kind!r}"


def check_rows(choice: Choice, rows: int, name: str = "--batch_size") -> None:
    """Check how many rows are decoded at once.

    Raises:
      ValueError: the kernels do not support as many.
    """
    if choice.kernels == "native" and rows > library.MAX_ROWS:
        raise ValueError(
            f"{name}={rows}: native kernels decode at most {library.MAX_ROWS} rows at once; lower it, or pass "
            "--kernels=xla"
        )


def load(spec: str | Path | None, choice: Choice, backend: Backend) -> Decoder:
    """Load a model.

    Args:
      spec: as jaxbench.pretrained.weights.load_checkpoint takes it.

    Raises:
      ValueError: as load_checkpoint raises; or the weights' format does not fit the model's widths.
    """
    if choice.kernels == "native":
        packed = checkpoint.load(spec, weights_as=choice.weights)
        settings = {"cache_dtype": choice.cache, "activations": choice.activations, "threads": choice.threads}
        return Decoder(backend.native.build(packed, **settings), backend.sample, choice, _formats(packed))
    held = weights.load_checkpoint(spec)
    if backend.parallel is not None:
        model = backend.parallel.build(held.config, held.params, backend.devices, dtype=choice.weights)
        return Decoder(model, backend.parallel, choice, choice.weights, backend.num_devices)
    model = backend.transformer.build(held.config, held.params, dtype=choice.weights, **backend.placement)
    return Decoder(model, backend.sample, choice, choice.weights)


def _formats(packed: checkpoint.PackedCheckpoint) -> str:
    """Number types of the matrices, the largest share of the bytes first."""
    sizes: dict[str, int] = {}
    for matrix in packed.matrices.values():
        sizes[matrix.format] = sizes.get(matrix.format, 0) + matrix.data.nbytes
    return " and ".join(sorted(sizes, key=lambda name: -sizes[name]))
