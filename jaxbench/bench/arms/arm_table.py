"""The arms of the comparison: the one table that everything which lists arms is made from (S file).

A new backend is one row: suites take it, the roofline measures its array library, verdicts count it, float32 outputs
are held to the baseline's, and the report has its name and colour. tests/bench/arms/test_arm_table.py holds that.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from jaxbench.bench.arms import contract


class ArmRow(NamedTuple):
    """What is known of an arm before its library is imported."""

    module: str  # where its class is
    attribute: str  # the class's name there
    label: str  # as people know it
    color: str  # readable on white and on near-black alike: contrast at least 3:1 against both
    library: str | None = None  # its array library, whose rates make the roofline, one arm a library; None = has none
    is_judged: bool = False  # one of jaxbench's own: its verdicts are counted, its model is proven in float64
    has_run_step: bool = False  # offers train.form=run, the step of experiments/train.py
    has_own_weights: bool = False  # computes with narrower values by design: its outputs are shown, never judged
    is_extra: bool = False  # a control, or minutes of compiling: in no suite that does not name it


ARMS = {
    "flax": ArmRow("jaxbench.bench.arms.jax_arms", "FlaxArm", "Flax NNX", "#3b82f6", "XLA", is_judged=True,
                   has_run_step=True),
    "equinox": ArmRow("jaxbench.bench.arms.jax_arms", "EquinoxArm", "Equinox", "#0d9f8c", "XLA", is_judged=True),
    "flax_native": ArmRow("jaxbench.bench.arms.native_arms", "FlaxNativeArm", "Flax native", "#2f6db5", "XLA"),
    "equinox_native": ArmRow("jaxbench.bench.arms.native_arms", "EquinoxNativeArm", "Equinox native", "#1f7d72", "XLA",
                             is_extra=True),
    "torch_eager": ArmRow("jaxbench.bench.arms.torch_arms", "EagerArm", "PyTorch eager", "#e5722a", "PyTorch",
                          has_run_step=True),
    "torch_plain": ArmRow("jaxbench.bench.arms.torch_arms", "PlainArm", "PyTorch not packed", "#b0a23a", "PyTorch",
                          is_extra=True),
    "torch_compile": ArmRow("jaxbench.bench.arms.torch_arms", "CompiledArm", "PyTorch compiled", "#c2568f", "PyTorch",
                            has_run_step=True),
    "torch_compile_step": ArmRow("jaxbench.bench.arms.torch_arms", "CompiledStepArm", "PyTorch compiled step",
                                 "#a8742a", "PyTorch", is_extra=True),
    "torch_native": ArmRow("jaxbench.bench.arms.native_arms", "TorchNativeArm", "PyTorch native", "#b8541a", "PyTorch",
                           is_extra=True),
    "transformers": ArmRow("jaxbench.bench.arms.peers", "TransformersArm", "HF transformers", "#8b8f98", "PyTorch"),
    "transformers_compile": ArmRow("jaxbench.bench.arms.peers", "CompiledTransformersArm", "HF transformers compiled",
                                   "#5f8299", "PyTorch", is_extra=True),
    "flax_file": ArmRow("jaxbench.bench.arms.native_arms", "FlaxFileArm", "Flax native, file's weights", "#3f8f3f",
                        "XLA", has_own_weights=True),
    "flax_file_int8": ArmRow("jaxbench.bench.arms.native_arms", "FlaxFileInt8Arm",
                             "Flax native, file's weights, 8-bit activations", "#6f8f2f", "XLA", has_own_weights=True),
    "flax_int8": ArmRow("jaxbench.bench.arms.native_arms", "FlaxInt8Arm", "Flax native, 8-bit weights and activations",
                        "#4f9f5f", "XLA", has_own_weights=True),
    "torch_file": ArmRow("jaxbench.bench.arms.native_arms", "TorchFileArm", "PyTorch native, file's weights",
                         "#a06a3a", "PyTorch", has_own_weights=True),
    "llama_cpp": ArmRow("jaxbench.bench.arms.peers", "LlamaCppArm", "llama.cpp in Python", "#9061d6",
                        has_own_weights=True),
    "llama_bench": ArmRow("jaxbench.bench.arms.llama_bench", "LlamaBenchArm", "llama.cpp", "#7a4fd0",
                          has_own_weights=True),
    "llama_bench_one": ArmRow("jaxbench.bench.arms.llama_bench", "LlamaBenchOneArm", "llama.cpp, one thread", "#a05fc0",
                              has_own_weights=True),
}  # fmt: skip


# The same arm a second time, under a name of its own: what differs between the two is chance (bench/qualify.py).
AGAIN = "_again"


def names(quality: str) -> tuple[str, ...]:
    """Names of the arms whose row says True under `quality`, e.g. "is_judged", in the table's order."""
    return tuple(name for name, row in ARMS.items() if getattr(row, quality))


def create(name: str, **arguments: Any) -> contract.Arm:
    """Arm of this name, made from its row; only now is its library imported.

    Raises:
      ValueError: there is no such arm.
    """
    if (kind := name.removesuffix(AGAIN)) not in ARMS:
        raise ValueError(f"arms: unknown arm {name!r}, known: {', '.join(ARMS)}")
    row = ARMS[kind]
    return getattr(importlib.import_module(row.module), row.attribute)(**arguments)
