"""What one optimiser step does: the part of a training configuration that both backends compile (S file)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import pydantic

from jaxbench.config import Base
from jaxbench.lora.config import PARAMETERS as ADAPTERS
from jaxbench.training.precision import DelayedScaling, LossScaling

TWIN_OPTIMIZERS = ("adamw", "sgd")  # also in torch_ref
# Hyperparameters that each kind of optimiser has, besides weight_decay and decay, which all have
HYPERPARAMETERS = {
    "adamw": ("b1", "b2", "eps"),
    "adafactor": (),
    "lion": ("b1", "b2"),
    "sgd": ("momentum",),
    "muon": ("b1", "b2", "eps", "momentum", "muon_ratio"),
}
# What each rematerialisation policy reads
REMAT_SETTINGS = {"none": (), "block": (), "group": ("group",), "names": ("names",), "offload": ("names",)}
SCALING_SETTINGS = {"loss_scaling": "float16", "delayed_scaling": "float8"}  # and the precision that reads them


class OptimizerConfig(Base):
    """An optimiser and its hyperparameters; one that the kind does not have keeps its default.

    adamw (Loshchilov and Hutter 2019, arXiv:1711.05101), adafactor (Shazeer and Stern 2018, arXiv:1804.04235), lion
    (Chen et al. 2023, arXiv:2302.06675), sgd, muon (Jordan et al. 2024; for the layers' kernels, AdamW for the rest).
    """

    kind: Literal["adamw", "adafactor", "lion", "sgd", "muon"] = "adamw"
    b1: float = pydantic.Field(default=0.9, ge=0, lt=1)  # first moment: adamw, lion, muon's AdamW
    b2: float = pydantic.Field(default=0.95, ge=0, lt=1)  # second moment: adamw, lion, muon's AdamW
    eps: float = pydantic.Field(default=1e-8, gt=0)  # adamw, muon's: added to the root of the corrected second moment
    momentum: float = pydantic.Field(default=0.9, ge=0, lt=1)  # sgd, muon; 0 = none
    weight_decay: float = pydantic.Field(default=0.1, ge=0)  # decoupled, times the learning rate; sgd: L2
    decay: Literal["all", "matrices"] = "matrices"  # which parameters decay: all, or kernels and embeddings
    muon_ratio: float = pydantic.Field(default=1.0, gt=0)  # muon: kernels' learning rate / AdamW's for the rest
    trained: Literal["all", "adapters"] = "all"  # adapters: those of `lora` are trained, the rest is frozen

    @pydantic.model_validator(mode="after")
    def _check_hyperparameters(self) -> OptimizerConfig:
        _check_read(self, f"optimizer: kind={self.kind}", HYPERPARAMETERS, self.kind)
        return self

    def decays(self, name: str) -> bool:
        """Return True if weight decay applies to the parameter of this dotted name."""
        return self.decay == "all" or is_matrix(name)

    def is_trained(self, name: str) -> bool:
        """Return True if the parameter of this dotted name is trained; a workload may freeze others."""
        return self.trained == "all" or re.fullmatch(ADAPTERS, name) is not None

    def rate_ratio(self, name: str) -> float:
        """Return the ratio of this parameter's learning rate to the base rate; a workload may define other ratios."""
        return 1.0


def _check_read(settings: Base, choice: str, readers: Mapping[str, tuple[str, ...]], chosen: str) -> None:
    """Check that settings that the choice does not read are left at their defaults: they would do nothing.

    Args:
      choice: what was chosen, for the message.
      readers: the names of the settings that each possible choice reads.

    Raises:
      ValueError: some have other values; the message names them, and the choices that read them.
    """
    unread = []
    for name in dict.fromkeys(name for names in readers.values() for name in names):
        value, default = getattr(settings, name), type(settings).model_fields[name].default
        if name not in readers[chosen] and value != default:
            which = ", ".join(other for other, names in readers.items() if name in names)
            unread.append(f"{name}={value} (read by {which}; default {default})")
    if unread:
        raise ValueError(f"{choice} does not read {', '.join(unread)}; leave it out")


def is_matrix(name: str) -> bool:
    """Return True for kernels and embeddings, by dotted name.

    The number of axes does not tell them apart: gates of banks, persistent tokens and depthwise convolutions, which
    weight each channel separately, have two axes, and so may a norm's gain, if there is one per head.
    """
    return name.endswith((".kernel", ".embedding")) and not name.endswith("_conv.kernel")


def holds_zeros(name: str) -> bool:
    """Return True for the parameters, by dotted name, whose zeros StepConfig.hold_zeros keeps: kernels inside layers.

    Pruning acts on these (quantization/pruning.py); biases, norms, embeddings and depthwise convolutions may start from
    zeros.
    """
    return name.startswith("layers.") and name.endswith(".kernel") and is_matrix(name)


class RematConfig(Base):
    """What the backward pass recomputes instead of storing it (Chen et al. 2016, arXiv:1604.06174)."""

    policy: Literal["none", "block", "group", "names", "offload"] = "none"
    group: int = pydantic.Field(default=2, ge=1)  # group: blocks recomputed together
    names: tuple[str, ...] = ("attention", "mlp")  # names: kept nevertheless; offload: kept in pinned host memory

    @pydantic.model_validator(mode="after")
    def _check_settings(self) -> RematConfig:
        _check_read(self, f"remat: policy={self.policy}", REMAT_SETTINGS, self.policy)
        return self


class OffloadConfig(Base):
    """What is kept in the host's pinned memory and streamed to the device and back (JAX)."""

    optimizer: bool = False  # the optimiser's state, between steps
    gradients: bool = False  # gradients, from the backward pass to the update


class StepConfig(Base):
    """One optimiser step."""

    precision: Literal["float64", "float32", "bfloat16", "float16", "float8"] = "float32"  # float64 needs 64-bit mode
    loss_scaling: LossScaling = LossScaling()  # float16 only
    delayed_scaling: DelayedScaling = DelayedScaling()  # float8 only
    accumulation: int = pydantic.Field(default=1, ge=1)  # micro-batches a step; divides the batch
    clip_norm: float | None = pydantic.Field(default=1.0, gt=0)  # largest global gradient norm; null = not clipped
    nonfinite: Literal["skip", "stop"] = "stop"  # a loss or gradient that is not finite: skip the step, or end the run
    remat: RematConfig = RematConfig()
    offload: OffloadConfig = OffloadConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    hold_zeros: bool = False  # zeros of layers' kernels stay zero: for training a pruned model
    # JAX, products of rows by kernels in bfloat16 on one CPU: xla, or native (native/products.py); auto = the faster
    kernels: Literal["auto", "native", "xla"] = "auto"
    torch_compile: bool = False  # PyTorch: loss and gradient by torch.compile (Inductor); JAX always compiles

    @pydantic.model_validator(mode="after")
    def _check_scaling(self) -> StepConfig:
        for name, reader in SCALING_SETTINGS.items():
            value = getattr(self, name)
            if self.precision != reader and value != type(value)():
                raise ValueError(
                    f"step: precision={self.precision} does not read {name}={value.model_dump()}, only {reader} does; "
                    "leave it out"
                )
        return self

    def on_host(self) -> list[str]:
        """Names of what the step keeps in the host's pinned memory: optimizer, gradients, remat."""
        kept = [name for name, is_on in self.offload.model_dump().items() if is_on]
        return kept + (["remat"] if self.remat.policy == "offload" else [])
