"""Memory of a run with a batch, from a step and an evaluation. Twin: jaxbench/training/batch_size.py.

On a CPU both are traced on tensors without data (PyTorch's FakeTensorMode) and the bytes in use are counted, so that
nothing is computed and no memory is taken. On a GPU both are run, and the peak is the one that PyTorch's allocator
reports. The search over it is jaxbench/training/largest_batch.py.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.extension import Extension
from jaxbench.training.largest_batch import LargestBatch, find_optimal_batch_size
from jaxbench.training.train_config import TrainConfig
from torch_ref import train
from torch_ref.training import engine, optimizer_step

__all__ = ["LargestBatch", "device_bytes", "find_optimal_batch_size", "run_bytes"]

# Memory that glibc's malloc may hold for a byte in use: it cannot always join freed blocks into those that are needed
# next. Eight decoders held 1.40 to 2.42 (docs/training.md); with each block mapped on its own they hold 1.03.
HELD = 2.5
TRACED = 2  # micro-batches of a step that are traced: the first makes the gradients, the others are alike


def run_bytes(
    settings: TrainConfig, config: TransformerConfig, *, extension: Extension = Extension(), device: str = "cpu"
) -> int:
    """Return the peak bytes of the device's memory in a run: of its step, or of an evaluation while the state stays.

    extension: what a workload adds to the decoder `config`. A batch that a GPU cannot hold needs one byte more than it
    has. On a CPU a compiled step (step.torch_compile) is counted as an eager one.
    """
    if device == "cpu":
        return int(HELD * _traced_bytes(settings, config, extension))
    return _measured_bytes(settings, config, extension, device)


def device_bytes(device: str = "cpu") -> int:
    """Return the memory of the device in bytes, or the host's free memory if the device is the CPU."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.get_device_properties(device).total_memory)


def _traced_bytes(settings: TrainConfig, config: TransformerConfig, extension: Extension) -> int:
    """Peak bytes of all tensors of a run on a CPU, counted while it is traced."""
    count = min(TRACED, settings.step.accumulation)
    rows = settings.batch_size // settings.step.accumulation * count
    eager = settings.step.model_copy(update={"torch_compile": False, "accumulation": count})
    with FakeTensorMode(allow_non_fake_inputs=True), _InUse() as in_use:
        _run_once(settings.model_copy(update={"step": eager, "batch_size": rows}), config, extension, "cpu")
    token_bytes = 17 if settings.data.document_mask else 9  # ids, targets, mask; positions and segments
    return in_use.peak + (settings.batch_size - rows) * settings.data.seq_len * token_bytes


def _measured_bytes(settings: TrainConfig, config: TransformerConfig, extension: Extension, device: str) -> int:
    """Peak bytes that a GPU's allocator gave to a run; one more than the device has if it is out of memory."""
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _run_once(settings, config, extension, device)
        needed = torch.cuda.max_memory_allocated(device)
    except torch.OutOfMemoryError:
        needed = device_bytes(device) + 1
    gc.collect()  # after the except clause: until then its traceback holds the run's tensors
    torch.cuda.empty_cache()
    return needed


def _run_once(settings: TrainConfig, config: TransformerConfig, extension: Extension, device: str) -> None:
    """Make a run's state from zeros, take one step, and evaluate one batch."""
    zero = np.zeros((), np.float32)
    params = {name: np.broadcast_to(zero, shape) for name, shape in initial.parameter_shapes(config).items()}
    run = engine.Engine(settings, config, params, extension=extension, device=device)
    shape = (settings.batch_size, settings.data.seq_len)
    ids, mask = np.zeros(shape, np.int32), np.ones(shape, bool)
    packed = ids if settings.data.document_mask else None
    arrays = train.Batch(ids, ids, packed, mask, packed)
    run.step(arrays, 0.0)
    batch = train.Batch(*(None if x is None else torch.as_tensor(x, device=device) for x in arrays))
    optimizer_step.eval_step(run.state.params, batch, graph=None, step_config=run.step_config)  # as Engine.evaluate,
    # which reads the result: there is none while it is traced


class _InUse(TorchDispatchMode):
    """Counts the bytes of the storages that operations return, until each is freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # by the address of a storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, once, and stop counting it when it is freed."""
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, address: int) -> None:
        self.now -= self._sizes.pop(address)
