"""The arms of the comparison, in the one table from which every list of arms is made (S file).

A new backend is one row: suites accept it, the roofline measures its array library, verdicts count it, its float32
outputs are compared with the baseline's, and the report has its name and colour. tests/bench/arms/test_arm_table.py
checks that.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from jaxbench.bench.arms import contract


class ArmRow(NamedTuple):
    """Facts of an arm that are known before its library is imported."""

    module: str  # module of its class
    attribute: str  # name of the class
    label: str  # display name
    color: str  # readable on white and on near-black alike: contrast at least 3:1 against both
    library: str | None = None  # its array library, measured for the roofline (one arm per library); None = has none
    is_judged: bool = False  # one of jaxbench's own: its verdicts are counted, its model is proven in float64
    has_run_step: bool = False  # supports train.form=run, the step of experiments/train.py
    has_own_weights: bool = False  # computes with narrower values by design: its outputs are shown, never judged
    is_extra: bool = False  # a control, or takes minutes to compile: only in suites that name it


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
    "torch_int4": ArmRow("jaxbench.bench.arms.torch_arms", "Int4Arm", "PyTorch's own 4-bit weights", "#b8602f",
                         "PyTorch", has_own_weights=True),
    "llama_cpp": ArmRow("jaxbench.bench.arms.peers", "LlamaCppArm", "llama.cpp in Python", "#9061d6",
                        has_own_weights=True),
    "llama_bench": ArmRow("jaxbench.bench.arms.llama_bench", "LlamaBenchArm", "llama.cpp", "#7a4fd0",
                          has_own_weights=True),
    "llama_bench_one": ArmRow("jaxbench.bench.arms.llama_bench", "LlamaBenchOneArm", "llama.cpp, one thread", "#a05fc0",
                              has_own_weights=True),
}  # fmt: skip


def is_native(name: str) -> bool:
    """Return True for an arm that computes with jaxbench's own kernels."""
    return ARMS[name].module.endswith("native_arms")


# Suffix of the same arm run a second time: any difference between the two is chance (bench/qualify.py).
AGAIN = "_again"


def names(quality: str) -> tuple[str, ...]:
    """Return the names of the arms whose row has a true `quality`, e.g. "is_judged", in the table's order."""
    return tuple(name for name, row in ARMS.items() if getattr(row, quality))


def create(name: str, **arguments: Any) -> contract.Arm:
    """Create the arm of this name from its row; its module is imported only now.

    Raises:
      ValueError: there is no such arm.
    """
    if (kind := name.removesuffix(AGAIN)) not in ARMS:
        raise ValueError(f"arms: unknown arm {name!r}, known: {', '.join(ARMS)}")
    row = ARMS[kind]
    return getattr(importlib.import_module(row.module), row.attribute)(**arguments)
