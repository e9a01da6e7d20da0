"""Tensor-parallel decoding: one decoder over several processes, each with its own device; heads, feed-forward width and
embedding are split.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3. A process multiplies by its part of a kernel, and two sums
over processes per layer combine the parts. Every process runs the same generator on the same prompts and draws the same
tokens: sums and gathers give all of them equal bits.

Twin: jaxbench/parallel/decoding.py. Differs from it: a process holds a module of its own parts, so a size that the
processes do not divide stays whole instead of being split along another dim; and a layer's heads lie in the cache of
the process that computes them, so that several rows move no more data per row than one.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from jaxbench.config import TransformerConfig
from torch_ref import functional, nn, sample, transformer
from torch_ref.quantization.weight_only import WeightOnlyLinear

HELD = r"\.(kernel|codes|scales|zeros)"  # a matrix: floats, or integers with their scales and zeros
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # how processes find each other; torchrun sets them


def attached(device: str, count: int) -> DeviceMesh:
    """Join the `count` processes of this machine that decode together, each on its own device of a kind: cpu or gpu.

    Blocks until all have come. Processes that PyTorch's process group holds already are taken as they are.

    Raises:
      ValueError: there are fewer GPUs, or another number of processes.
    """
    kind = "cuda" if device == "gpu" else device
    if kind == "cuda" and torch.cuda.device_count() < count:
        raise ValueError(
            f"--tensor_parallel={count}: PyTorch sees {torch.cuda.device_count()} devices of the kind {device}; wanted "
            "at most as many"
        )
    missing = [name for name in VARIABLES if name not in os.environ]
    if not dist.is_initialized() and missing:
        raise ValueError(
            f"--tensor_parallel={count}: {', '.join(missing)} not set; start {count} processes by torchrun "
            f"--nproc-per-node={count}"
        )
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if size != count:
        raise ValueError(f"--tensor_parallel={count}: there are {size} processes (WORLD_SIZE), wanted {count}")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)  # NCCL would complain otherwise
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
    return init_device_mesh(kind, (count,))


def build(
    config: TransformerConfig, params: Mapping[str, np.ndarray], devices: DeviceMesh, **compute: Any
) -> transformer.Transformer:
    """Build a decoder that is split over devices; no device ever holds more than its part, each process holds all of
    it in the host's memory meanwhile.

    compute: as transformer.build takes it, without a device.

    Raises:
      ValueError: as transformer.build or `split` raise.
    """
    model = transformer.build(config, params, **compute)
    split(model, config, devices)
    return model


def split(model: transformer.Transformer, config: TransformerConfig, devices: DeviceMesh) -> None:
    """Replace a decoder's parameters by this process's parts, in place; floats or packed weights
    (quantization/weight_only.py). No gradient goes through what comes of it.

    A bias that follows a sum over processes is added by the first of them; it is zeros in the others.

    Raises:
      ValueError: the devices do not divide the key-value heads, or the inputs of a packed matrix at a group's end; or
        the decoder is compiled, or already split.
    """
    if model.torch_compile or _is_split(model):
        is_compiled = bool(model.torch_compile)
        raise ValueError(
            f"decoding: a decoder with torch_compile={model.torch_compile!r}, split already: {not is_compiled}; wanted "
            "torch_compile='' and one that is whole"
        )
    places = shardings(dict(model.named_parameters()) | dict(model.named_buffers()), config, devices)
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, WeightOnlyLinear)}
    forms = {name: _local_form(name, layer, places, devices.size()) for name, layer in packed.items()}
    rank, group, device = devices.get_local_rank(), devices.get_group(), _device(devices)
    for name, place in places.items():
        owner, _, leaf = name.rpartition(".")
        whole = getattr(module := model.get_submodule(owner), leaf).detach()
        part = whole.chunk(devices.size(), place.dim)[rank].clone() if isinstance(place, Shard) else whole
        setattr(module, leaf, torch.nn.Parameter(part.to(device), requires_grad=False))
    for name, form in forms.items():
        packed[name].form = form
    for layer in model.layers:
        layer.attention.num_heads //= devices.size()
        layer.attention.num_kv_heads //= devices.size()
    for name, layer in model.named_modules():
        held = places.get(f"{name}.kernel", places.get(f"{name}.codes"))
        if held == Shard(0):
            layer.register_forward_hook(_Sum(group))
            if layer.bias is not None and rank:
                layer.bias.zero_()
    if isinstance(places.get("head.kernel"), Shard):
        model.head.register_forward_hook(_Gather(group))
    if isinstance(places["embed.embedding"], Shard):
        model.embed = _SplitEmbed(model.embed, group)


def shardings(state: Mapping[str, Any], config: TransformerConfig, mesh: DeviceMesh) -> dict[str, Shard | Replicate]:
    """Return the place of every parameter of a decoder (arrays or shapes by dotted name): Shard(dim), or Replicate.

    Raises:
      ValueError: the mesh's devices do not divide the key-value heads; or a parameter is none of a decoder's.
    """
    count = mesh.size()
    if config.num_kv_heads % count:
        raise ValueError(f"decoding: num_kv_heads={config.num_kv_heads} over {count} devices; wanted a divisor")

    def over(size: int, dim: int) -> Shard | Replicate:
        return Replicate() if size % count else Shard(dim)

    layer, wide = r"layers\.\d+\.", over(config.d_ff, 0)
    rules = (
        (r"embed\.embedding", over(config.d_model, 1)),
        (layer + r"attention\.(q_proj|k_proj|v_proj)" + HELD, Shard(1)),
        (layer + r"attention\.(q_proj|k_proj|v_proj)\.bias", Shard(0)),
        (layer + r"attention\.o_proj" + HELD, Shard(0)),
        (layer + r"mlp\.(gate_proj|up_proj)" + HELD, over(config.d_ff, 1)),
        (layer + r"mlp\.(gate_proj|up_proj)\.bias", wide),
        (layer + r"mlp\.down_proj" + HELD, wide),
        (layer + r"(attention\.o_proj|mlp\.down_proj)\.bias", Replicate()),
        (layer + r"(attention|mlp)_(norm|post_norm)\.(scale|bias)", Replicate()),
        (layer + r"attention\.(q_norm|k_norm)\.scale", Replicate()),
        (r"final_norm\.(scale|bias)|position\.embedding", Replicate()),
        (r"head\.kernel", over(config.vocab_size, 1)),
    )
    places = {n: next((place for pattern, place in rules if re.fullmatch(pattern, n)), None) for n in state}
    if missing := [name for name, place in places.items() if place is None]:
        raise ValueError(f"decoding: parameters without a rule: {missing}; wanted those of a decoder")
    for name, place in places.items():
        if name.endswith((".scales", ".zeros")) and place == Shard(0) and state[name].shape[0] == 1:
            places[name] = Replicate()  # one for all inputs, however they are split
    return places


class Generator(sample.Generator):
    """Generator for a decoder that `split` has split; every process calls it alike, with the same prompts and seed.

    Raises:
      ValueError: the decoder is whole.
    """

    def __init__(self, model: transformer.Transformer, **options: Any):
        if not _is_split(model):
            raise ValueError(
                f"decoding: none of the decoder's {len(model.layers)} layers is summed over processes; call "
                "decoding.split first"
            )
        super().__init__(model, **options)


def _device(devices: DeviceMesh) -> torch.device:
    """Return this process's device."""
    is_cuda = devices.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(devices.device_type)


def _is_split(model: transformer.Transformer) -> bool:
    hooks = (layer.attention.o_proj._forward_hooks for layer in model.layers)
    return any(isinstance(hook, _Sum) for each in hooks for hook in each.values())


def _local_form(name: str, layer: WeightOnlyLinear, places: Mapping[str, Shard | Replicate], count: int) -> Any:
    """Layout of a process's part of a packed matrix; bytes hold codes of one group, so it is split between groups."""
    form = layer.form
    if places[f"{name}.codes"] != Shard(0):
        return form
    local = dataclasses.replace(form, inputs=form.inputs // count)
    is_even = form.inputs % (count * form.group) == 0 if form.grid.group_size else form.per_byte == 1
    if not is_even or local.per_byte != form.per_byte:
        raise ValueError(
            f"decoding: {name} has {form.inputs} inputs in groups of {form.group}, {form.per_byte} in a byte, over "
            f"{count} devices; wanted whole groups on each"
        )
    return local


class _Sum(NamedTuple):
    """Forward hook of a layer whose inputs are split: adds up the processes' outputs."""

    group: dist.ProcessGroup

    def __call__(self, layer: torch.nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return _summed(output, self.group)


class _Gather(NamedTuple):
    """Forward hook of a layer whose outputs are split: every process gets all of them."""

    group: dist.ProcessGroup

    def __call__(self, layer: torch.nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return _gathered(output, self.group)


class _SplitEmbed(nn.Embed):
    """Embedding table of which each process has a part of the width."""

    def __init__(self, whole: nn.Embed, group: dist.ProcessGroup):
        torch.nn.Module.__init__(self)
        self.embedding, self.scale, self._group = whole.embedding, whole.scale, group

    def forward(self, index: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return _gathered(super().forward(index), self._group)

    def attend(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        own = x.chunk(self._group.size(), -1)[self._group.rank()]
        return _summed(functional.matmul(own, self.embedding, transposed=True), self._group)


def _summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = part.contiguous()
    dist.all_reduce(part, group=group)
    return part


def _gathered(part: Float[Tensor, "*rows part"], group: dist.ProcessGroup) -> Float[Tensor, "*rows whole"]:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
