"""Run one parity case: every gate, every layer, as one JSON-able result.

Command: python -m jaxbench.parity.run --case=transformer/smollm2 --quick --output=parity.json
Expected: 1 minute on 2 cores, exit code 0; the last line names the worst error (1e-14).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxbench import outputs
from jaxbench.parity import capture, cases, distance, evidence, gates, products
from jaxbench.parity.cases import BACKENDS, Case

NUM_PERTURBED = 4  # curves from weights moved by one ulp
ULP = 2.0**-23  # of float32, relative
REDUCED = ("float32", "bfloat16")
KERNEL_DTYPE = "bfloat16"  # of a case's fused attention
NUM_DRAWS = 16  # batches whose gradients decide when one batch's rounding errors differ too much


@contextlib.contextmanager
def pinned(dtype: str) -> Iterator[dict[str, Any]]:
    """Set products to the highest precision, and JAX's 64-bit mode as the dtype needs; yield the settings."""
    import jax
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        yield {
            "jax_default_matmul_precision": jax.config.jax_default_matmul_precision,
            "jax_enable_x64": jax.config.jax_enable_x64,
            "torch_tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "torch_tf32_cudnn": torch.backends.cudnn.allow_tf32,
        }


def unit_positions(
    outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], positions: np.ndarray
) -> dict[str, np.ndarray]:
    """Module outputs [B T ..] at real positions [R D], each divided by the norm of its reference.

    So every position has the same weight in rounding errors: real models put most of a layer's norm on one token
    (Sun et al. 2024, arXiv:2402.17762), whose rounding is a single draw; and padding affects no result. Outputs of a
    whole row [B ...] are normalised by row.
    """
    scaled = {}
    for name, value in outputs.items():
        wanted = np.asarray(reference[name])
        kept = positions >= 0 if wanted.shape[:2] == positions.shape else np.ones(len(wanted), bool)
        rows = wanted[kept].reshape(np.count_nonzero(kept), -1)
        norms = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
        mine = np.asarray(value)[kept].reshape(rows.shape).astype(np.float64)
        scaled[name] = mine / np.where(norms > 0, norms, 1.0)
    return scaled


@contextlib.contextmanager
def torch_threads(case: Case) -> Iterator[None]:
    """Run PyTorch on one thread for tiny cases, whose tensors cost less than handing them to threads."""
    import torch

    before = torch.get_num_threads()
    try:
        if case.config is not None:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def perturbed(params: Mapping[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
    """Parameters moved by one unit in the last place of float32, each value up or down at random."""
    moved = {name: x * (1.0 + ULP * random.choice((-1.0, 1.0), x.shape)) for name, x in params.items()}
    return {name: x.astype(params[name].dtype) for name, x in moved.items()}


def check_backend(case: Case, backend: str) -> None:
    """Check that a backend supports a case.

    Raises:
      ValueError: there is no such backend, or the case has no twin in it.
    """
    if backend not in BACKENDS:
        raise ValueError(f"--backend={backend} is not one of {', '.join(BACKENDS)} (PyTorch is always the other side)")
    if backend not in case.backends:
        raise ValueError(f"--backend={backend} has no twin of {case.id}, only {', '.join(case.backends)}")


def sides(case: Case, config: Any, params: Mapping[str, np.ndarray], *, dtype: str, backend: str) -> tuple[Any, Any]:
    """Make the JAX side and the PyTorch side of a case.

    Raises:
      ValueError: no such backend, or the case has no twin in it.
    """
    from jaxbench.parity import torch_side

    check_backend(case, backend)
    jax_side = importlib.import_module(f"jaxbench.parity.{backend}_side")
    arguments = (case, config, params)
    return jax_side.Side(*arguments, dtype=dtype), torch_side.Side(*arguments, dtype=dtype)


def run(
    case: Case,
    *,
    backend: str = "flax",
    quick: bool = False,
    gradients: bool | None = None,
    dtypes: tuple[str, ...] = REDUCED,
    model: str | None = None,
) -> dict[str, Any]:
    """Run a case and return plain values: gates, errors of every layer, first divergence and blame.

    Args:
      backend: flax or equinox; PyTorch is the other side.
      quick: float64 outputs, blame, weights and decoding only.
      gradients: whether to compare them; None = as the case says.
      dtypes: narrower types, each compared by the ratio of errors against float64; a kernel's case uses KERNEL_DTYPE.
      model: checkpoint that replaces the case's own weights.

    Raises:
      ValueError: no such backend, or the case has no twin in it.
    """
    start = time.monotonic()
    if case.exact is not None:
        return _exact(case, backend) | {"seconds": round(time.monotonic() - start, 2)}
    config, params = cases.load(case, model=model)
    work = _Work(case, config, params, backend, case.gradients if gradients is None else gradients)
    with torch_threads(case):
        work.float64(is_quick=quick)
        for dtype in () if quick else dtypes if case.kernel is None else (KERNEL_DTYPE,):
            work.reduced(dtype)
    return work.result() | {"seconds": round(time.monotonic() - start, 2)}


def exact_gates(case: Case) -> tuple[list[gates.Gate], dict[str, Any]]:
    """Gates of a case that names its own module for them, and the settings they ran under."""
    with pinned("float64") as settings, torch_threads(case):
        return importlib.import_module(f"jaxbench.parity.{case.exact}").gates_of(case), settings


def _exact(case: Case, backend: str) -> dict[str, Any]:
    """Result of a case without a model, from its own gates, which compare numpy, JAX and PyTorch."""
    check_backend(case, backend)
    rows, settings = exact_gates(case)
    failed = next((gate for gate in rows if not gate.passed), None)
    first = {} if failed is None else {failed.what: failed.where}
    return outcome(case, backend, rows, settings, worst=max(gate.error for gate in rows), first=first)


def outcome(
    case: Case, backend: str, rows: list[gates.Gate], settings: dict[str, Any], *, worst: float, first: dict[str, str]
) -> dict[str, Any]:
    """Result of a case as plain values, for JSON; first: where each kind of tensor begins to differ."""
    return {
        "case": case.id,
        "backend": backend,
        "passed": all(gate.passed for gate in rows),
        "worst": worst,
        "gates": [gate._asdict() for gate in rows],
        "first_divergence": first.get("outputs"),
        "first_divergence_backward": first.get("output_gradients"),
        "first_divergence_by_kind": first,
        "blame": None,
        "layers": [],
        "parameters": [],
        "settings": settings,
    }


def _ratio(
    values: Mapping[str, np.ndarray],
    others: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    *,
    kind: str,
    dtype: str,
) -> distance.Comparison:
    """Errors of both sides against float64, with the gate's slack."""
    slack = gates.SLACK_EPSILONS[kind, dtype]
    return distance.compare_errors(values, others, wanted, kind=kind, dtype=dtype, slack_epsilons=slack)


class _Work:
    """Gates and layers of one run, collected as they are computed."""

    def __init__(self, case: Case, config: Any, params: Mapping[str, np.ndarray], backend: str, gradients: bool):
        self.case, self.config, self.params, self.backend = case, config, params, backend
        self.has_gradients = gradients
        self.arrays = cases.arrays(case, config)
        self.gates: list[gates.Gate] = []
        self.comparisons: dict[str, Any] = {}
        self.local: list[capture.LocalError] = []
        self.reference: evidence.Evidence | None = None
        self.settings: dict[str, Any] = {}

    def float64(self, *, is_quick: bool) -> None:
        """Run every float64 gate; keep PyTorch's float64 results as the reference of the narrower types."""
        gradients = self.has_gradients and not is_quick
        with pinned("float64") as self.settings:
            side, other = self._sides("float64")
            self.gates.append(self._precision(side, other, "float64", self.settings))
            self.gates += gates.conversion(side, other, self.params)
            self._free_memory()
            if side.is_captured:
                calls = other.calls(self.arrays, seed=evidence.SEED)
                forced = side.forced(self.arrays, calls, seed=evidence.SEED)
                self.local = capture.local_errors(forced, calls)
                self.gates.append(gates.blame(self.local))
                del calls, forced  # every module's inputs and outputs, on both sides
            jax_evidence = evidence.gather(side, self.case, self.config, gradients=gradients, is_quick=is_quick)
            del side  # a real model in float64 holds a gigabyte, and its gradients another
            self._free_memory()
            reference = evidence.gather(other, self.case, self.config, gradients=gradients, is_quick=is_quick)
        findings = evidence.judge(jax_evidence, reference)
        self.gates += findings.gates
        self.comparisons |= findings.comparisons
        self.reference = reference

    @staticmethod
    def _precision(side: Any, other: Any, dtype: str, settings: dict[str, Any]) -> gates.Gate:
        found = {each.name: each.products() for each in (side, other)}
        return products.gate(found, dtype, settings)

    def _free_memory(self) -> None:
        """Release compiled programs, which hold weights as constants, and freed blocks that malloc keeps.

        The default model's proof takes 4.8 GiB instead of 6.4; a tiny case keeps its programs.
        """
        if self.case.config is None:
            import jax

            jax.clear_caches()
            gc.collect()
            if sys.platform == "linux":
                ctypes.CDLL(None).malloc_trim(0)

    def reduced(self, dtype: str) -> None:
        """Run the error-ratio gates of a narrower type, and float32's training curve."""
        with pinned(dtype) as settings:
            side, other = self._sides(dtype)
            if dtype in products.BITS:
                self.gates.append(self._precision(side, other, dtype, settings))
            is_captured = side.is_captured
            # A real model's gradients are compared in float64 only: in narrow types a few tokens decide their error.
            gradients = self.has_gradients and self.case.gradients
            traces = [each.trace(self.arrays, gradients=gradients, seed=evidence.SEED) for each in (side, other)]
            values, others, wanted = (trace.outputs for trace in (*traces, self.reference.trace))
            if not is_captured:
                others, wanted = ({name: each[name] for name in values} for each in (others, wanted))
            scaled = (unit_positions(each, wanted, self.arrays.positions) for each in (values, others, wanted))
            self._record_ratio(_ratio(*scaled, kind="outputs", dtype=dtype), dtype)
            if self.case.kernel and self.reference.decoding is not None:
                self._record_ratio(self._decoding_ratio(side, other, dtype), dtype)
            if gradients:
                draw = (trace.gradients for trace in (*traces, self.reference.trace))
                ratio = _ratio(*draw, kind="gradients", dtype=dtype)
                over = ""
                if not ratio.passed:
                    ratio, over = (
                        self._over_batches(ratio, side, other, dtype),
                        f", mean of {NUM_DRAWS} batches",
                    )
                self._record_ratio(ratio, dtype, over)
            if dtype == "float32" and self.case.steps:
                self._train_float32(side, other)

    def _decoding_ratio(self, side: Any, other: Any, dtype: str) -> distance.Comparison:
        """Errors of cached decoding against the float64 reference, whose full and cached results agree."""
        decoded = [each.decode(self.arrays, prompt=self.case.prompt).incremental for each in (side, other)]
        logits = [{capture.ROOT: each} for each in (*decoded, self.reference.decoding.full)]
        scaled = (unit_positions(each, logits[-1], self.arrays.positions) for each in logits)
        return _ratio(*scaled, kind="outputs", dtype=dtype)._replace(kind="decoding")

    def _over_batches(self, first: distance.Comparison, side: Any, other: Any, dtype: str) -> distance.Comparison:
        """Gradients' errors averaged over NUM_DRAWS batches, including the first: one draw decides nothing."""
        draws = [first]
        with pinned("float64"):
            _, exact = self._sides("float64")
        for step in range(1, NUM_DRAWS):
            arrays = cases.arrays(self.case, self.config, step=step)
            with pinned("float64"):
                wanted = exact.trace(arrays, gradients=True, seed=evidence.SEED)
            traces = [each.trace(arrays, gradients=True, seed=evidence.SEED) for each in (side, other)]
            draw = (trace.gradients for trace in (*traces, wanted))
            draws.append(_ratio(*draw, kind="gradients", dtype=dtype))
        return distance.averaged(draws)

    def _record_ratio(self, ratio: distance.Comparison, dtype: str, over: str = "") -> None:
        self.comparisons[f"{ratio.kind}_{dtype}"] = ratio
        self.gates.append(gates.from_ratio(ratio, what=f"{ratio.kind}, {dtype}{over}"))

    def _train_float32(self, side: Any, other: Any) -> None:
        """Run gate P7: the float32 training curve stays within the effect of one-ulp changes of the weights."""
        steps, random = evidence.training_steps(self.case, self.config), np.random.default_rng(self.case.seed)
        how = {"learning_rates": evidence.learning_rates(self.case), "seed": evidence.SEED}
        curve = side.train(steps, self.case.step, **how).losses
        reference = other.train(steps, self.case.step, **how).losses
        curves = []
        for _ in range(NUM_PERTURBED):
            other.load_params(perturbed(self.params, random))
            curves.append(other.train(steps, self.case.step, **how).losses)
        exact = self.reference.training.losses
        self.gates.append(gates.training_noise(curve, reference, curves, reference=exact, dtype="float32"))

    def _sides(self, dtype: str) -> tuple[Any, Any]:
        return sides(self.case, self.config, self.params, dtype=dtype, backend=self.backend)

    def result(self) -> dict[str, Any]:
        """Gates, errors of every layer, first divergence and blame."""
        culprit = capture.blame(self.local, tolerance=distance.TOLERANCE_FLOAT64)
        failures = {kind: comparison.first_failure for kind, comparison in self.comparisons.items()}
        first = {kind: failure.name for kind, failure in failures.items() if failure is not None}
        worst = self.comparisons["outputs"].worst.error
        found = outcome(self.case, self.backend, self.gates, self.settings, worst=worst, first=first)
        blame = None if culprit is None else culprit.as_dict()
        return found | {"blame": blame, "layers": self._layers(), "parameters": self._parameters()}

    def _layers(self) -> list[dict[str, Any]]:
        columns = {"float64": self._errors("outputs"), "gradient": self._errors("output_gradients")}
        columns |= self._reduced_errors("outputs_{}")
        columns["own"] = {}
        for entry in self.local:
            columns["own"][entry.module] = max(entry.error, columns["own"].get(entry.module, 0.0))
        return [{"module": name} | {key: c.get(name) for key, c in columns.items()} for name in columns["float64"]]

    def _parameters(self) -> list[dict[str, Any]]:
        columns = {"float64": self._errors("gradients")} | self._reduced_errors("gradients_{}")
        columns |= {kind: self._errors(kind) for kind in self.comparisons if "_after_" in kind}
        columns = {key: column for key, column in columns.items() if column}
        return [
            {"parameter": name} | {key: c.get(name) for key, c in columns.items()} for name in self.params if columns
        ]

    def _errors(self, kind: str, field: str = "error") -> dict[str, float]:
        entries = self.comparisons[kind].entries if kind in self.comparisons else ()
        return {entry.name: getattr(entry, field) for entry in entries}

    def _reduced_errors(self, pattern: str) -> dict[str, dict[str, float]]:
        fields = itertools.product(REDUCED, (("", "error"), ("_torch", "other_error")))
        return {dtype + side: self._errors(pattern.format(dtype), field) for dtype, (side, field) in fields}


def define_flags() -> None:
    """Define the flags of this module's command."""
    from absl import flags

    flags.DEFINE_string("case", "transformer/smollm2", "id of the parity case")
    flags.DEFINE_string(
        "model", None, "checkpoint in place of the case's own weights: .gguf file or Hugging Face folder"
    )
    flags.DEFINE_string("output", None, "JSON file to write the result to")
    flags.DEFINE_enum("backend", "flax", list(BACKENDS), "which JAX model is compared with PyTorch's")
    flags.DEFINE_bool("quick", False, "float64 outputs, blame, weights and decoding only")


def main() -> int:
    """Run the case named by the flags; return 0 if every gate passes, else 1."""
    from absl import flags

    from jaxbench.parity import report

    values = flags.FLAGS
    result = run(cases.find(values.case), backend=values.backend, quick=values.quick, model=values.model)
    if values.output:
        outputs.write_json(values.output, result)
    print(report.summary(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    from jaxbench import cli

    define_flags()
    cli.run(main, about=__doc__)
