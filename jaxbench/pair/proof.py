"""Prove one pair: weights, outputs, gradients, state and optimiser steps in float64, then outputs in narrower types."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jaxbench import libtpu
from jaxbench.pair import contracted, draws, kept_state, modes, placing, steps, whole
from jaxbench.pair.jax_model import JaxModel, Options, as_type, calling, is_floating, open_model
from jaxbench.pair.jax_side import JaxSide
from jaxbench.pair.leaves import disturbed, has_known_layout, leaves_of
from jaxbench.pair.matching import OTHER_LAYOUT, Matching, match
from jaxbench.pair.module_findings import ModuleFindings, is_module
from jaxbench.pair.pair_file import first_line
from jaxbench.pair.public_types import Pair, Result
from jaxbench.pair.rules import Read, Rule, to_torch
from jaxbench.pair.steps import numbered
from jaxbench.pair.torch_side import Run, TorchSide, calling_torch, default_type, torch_leaves, wide
from jaxbench.pair.widening import widened
from jaxbench.parity import capture, distance, gates
from jaxbench.parity.run import pinned

MAX_SHOWN = 6  # names in a note


class Weights(NamedTuple):
    """Weights of both models, and which of them are trainable."""

    tensors: dict[str, np.ndarray]  # PyTorch's parameters and buffers
    arrays: dict[str, np.ndarray]  # the JAX model's, made from them; arrays not in here keep their own values
    trained_tensors: frozenset[str]
    trained_arrays: frozenset[str]
    is_training: bool  # whether gradients were compared in training mode
    outputs: tuple[np.ndarray, ...] = ()  # PyTorch's in float64, in evaluation mode


def run(pair: Pair) -> Result:
    """Run every gate of a pair, on the CPU."""
    libtpu.leave_out_if_absent()
    with jax.default_device(jax.devices("cpu")[0]):
        return _run(_Work(pair))


def weights(pair: Pair) -> Weights:
    """Return the weights that both models get in the proof, and PyTorch's outputs with them."""
    libtpu.leave_out_if_absent()
    with jax.default_device(jax.devices("cpu")[0]):
        work = _Work(pair)
        with pinned("float64"), default_type(torch.float64):
            work.open()
            is_training = work.modes()[-1] == "train"
            arrays = {name: np.asarray(x) for name, x in work.matching.to_jax(work.tensors).items()}
        outputs = work.reference["eval"].outputs.floating
        return Weights(work.tensors, arrays, work.trained(), work.trained_arrays(), is_training, outputs)


def _run(work: _Work) -> Result:
    pair = work.pair
    # Tensors that a module creates itself, such as an initial zero state, are float64, as JAX's are in 64-bit mode.
    with pinned("float64"), default_type(torch.float64), widened() if pair.widen else contextlib.nullcontext():
        work.open()
        work.compared_modes = work.modes()
        for mode in work.compared_modes:
            work.float64(mode)
        whole.judge(work)
    is_equal = all(gate.passed for gate in work.gates)  # narrower types tell nothing about two different functions
    for dtype in pair.dtypes if is_equal and not pair.quick else ():
        with pinned(dtype):
            try:
                work.reduced(dtype)
            except (NotImplementedError, TypeError, RuntimeError) as error:  # an operation does not support the type
                work.notes.append(f"{dtype} was not compared: {first_line(error)}")
    return work.result()


class _Work:
    """State of one run: its gates and findings so far."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.inputs = wide(pair.inputs)
        self.gates: list[gates.Gate] = []
        self.comparisons: dict[str, Any] = {}
        self.causes: dict[str, str] = {}
        self.notes: list[str] = ["casts inside both models were taken as casts to float64"] if pair.widen else []
        if constants := draws.constant(self.inputs):
            self.notes.append(f"constant inputs, which hide slips, were compared as they are: {', '.join(constants)}")
        self.trees: dict[bool, Any] = {}  # tree of JAX's outputs, by is_training
        self.is_random = False  # whether the PyTorch module was random in any mode so far
        self.placed: dict[str, list[placing.Placed]] = {}  # outputs by mode
        self.exact: dict[str, list[placing.Exact]] = {}  # those that are compared exactly

    def open(self) -> None:
        """Open both models, match their weights and give both the same weights."""
        pair = self.pair
        self.twin = TorchSide(pair.torch_module, dtype="float64", pick=pair.torch_outputs)
        with calling("the JAX model cannot be called on the inputs"):
            self.model = opened(pair, self.inputs, key=0)
        self.reference = {"eval": self._torch_run(is_training=False)}
        self.matching = self._matched()
        self.notes += self._untied()
        if pair.weights == "jax":
            arrays = {name: distance.widest(x) for name, x in {**self.model.params, **self.model.state}.items()}
            shapes = {name: x.shape for name, x in self.twin.tensors().items()}
            self.twin.load(to_torch(self.matching.rules, arrays, shapes))
            self.reference = {"eval": self.twin.run(self.inputs, is_training=False)}
        if pair.weights == "own":
            guesses = [guess for guess in self.matching.guesses if guess.why == OTHER_LAYOUT]
            self.notes += [f"{guess.name} has the values of {guess.rule.text()} of PyTorch's" for guess in guesses]
            own = {name: distance.widest(x) for name, x in {**self.model.params, **self.model.state}.items()}
            theirs = {name: np.asarray(x) for name, x in self.matching.to_jax(self.twin.tensors()).items()}
            self.record(distance.compare(own, theirs, kind="weights", tolerance=1e-6, has_floor=False), gate="P5")
        elif pair.disturb:
            self._disturb()
        self.tensors = self.twin.tensors()
        self.side = self._side("float64")
        self.findings = ModuleFindings(pair, self.model, self.twin, self.matching, self.side)

    def _untied(self) -> list[str]:
        """Return notes on trained tensors that several JAX arrays are copies of."""
        copies: dict[str, list[str]] = {}
        for name, rule in self.matching.rules.items():
            if isinstance(rule, Rule) and rule.part is None and name in self.model.params:
                for source in self.trained() & set(rule.sources):
                    copies.setdefault(source, []).append(name)
        what = "one tensor in PyTorch and several arrays in JAX, which part when they are trained"
        return [f"{source} is {what}: {', '.join(names)}" for source, names in copies.items() if len(names) > 1]

    def _disturb(self) -> None:
        """Randomise, in the twin alone, the constant tensors that the JAX model gets and a batch norm's statistics."""
        read = Read(self.twin.tensors())
        with calling("names: a function of the tensors fails"):
            self.matching.to_jax(read)
        before, own = self.reference["eval"], self.twin.tensors()
        statistics = {
            f"{path}.{name}".lstrip(".") for path, module in self.twin.module.named_modules()
            if isinstance(module, modes.STATISTICS) for name in ("running_mean", "running_var")
        }  # fmt: skip
        # Fresh ones, 0 and 1, would hide that the JAX model has none.
        names = self.twin.disturb(read.names | (statistics - self.pair.names.keys()))
        if not names:
            return
        self.reference = {"eval": self._torch_run(is_training=False)}
        if placing.count_not_finite(self.reference["eval"].outputs) > placing.count_not_finite(before.outputs):
            self.twin.load(own)
            self.reference = {"eval": before}
            what = "keep their values, as others give no number"
        else:
            what = "were compared with random values"
        self.notes.append(f"constant tensors, which hide slips, {what}: {_listed(names)}")

    def _matched(self) -> Matching:
        """Match the weights; calls both models once, so that the order of use can count."""
        with_values, calls = self.pair.weights == "own", self.reference["eval"].calls
        probe = arrays = {**self.model.params, **self.model.state}
        if self.pair.disturb:
            probe = arrays | disturbed({name: x for name, x in arrays.items() if is_floating(x)})
            calls = self.twin.probed(self.inputs)
        with calling("the JAX model cannot be called on the inputs"):
            watched = self._side("float64", self_made=probe).watched({}, self.inputs, is_training=False)
        mine = leaves_of(self.model, watched.calls, watched.order, self._stored(probe), with_values=with_values)
        called = {*watched.order, *map(_module, watched.calls), *dict(self.twin.module.named_modules())}
        left_out = {n for n, value in self.pair.names.items() if value is None and n in called - {""}}
        given = {n: x for n, x in self.pair.names.items() if not is_module(n, x, self.model, self.twin)}
        names = {n: x for n, x in given.items() if n not in left_out or n in self.twin.tensors()}
        return match(mine, torch_leaves(self.twin, calls, with_values=with_values), names)

    def _stored(self, arrays: Mapping[str, Any]) -> dict[str, bool]:
        """Return whether arrays whose names do not tell it are stored [in, out], as far as their use does."""
        model, framework = self.model, self.model.framework
        names = [n for n, x in model.params.items() if np.ndim(x) > 1 and not has_known_layout(framework, n)]
        if not names:
            return {}
        wide = {n: as_type(arrays[n], np.float64) for n in model.params}
        given = jax.tree.map(
            lambda x: as_type(x, np.float64) if is_floating(x) else x, example_of(self.pair, self.inputs)
        )
        called = lambda xs: model.apply(
            wide | dict(zip(names, xs, strict=True)), dict(model.state), given, False, None
        )[0]
        found = contracted.is_reversed(called, [wide[n] for n in names])
        return {names[i]: is_so for i, is_so in found.items()}

    def _side(self, dtype: str, *, self_made: Mapping[str, Any] | None = None) -> JaxSide:
        """Build the JAX side on PyTorch's weights, or on the arrays in self_made."""
        pair = self.pair
        to_jax = self.matching.to_jax if self_made is None else lambda tensors: self_made
        return JaxSide(
            self.model, to_jax, dtype=dtype, to_inputs=pair.jax_inputs, pick=pair.jax_outputs,
            per_example=pair.per_example, trees=self.trees,
        )  # fmt: skip

    def modes(self) -> tuple[str, ...]:
        """Return the modes to compare: the caller's, else evaluation, and training where it differs."""
        if self.pair.modes is not None:
            return self.pair.modes
        watched = lambda is_training: self.side.watched(self.tensors, self.inputs, is_training=is_training)
        is_given = self.pair.jax_modes.get("train", {}) != self.pair.jax_modes.get("eval", {})
        found, notes = modes.to_compare(self.twin, self.inputs, self.reference["eval"], watched, is_given=is_given)
        self.notes += notes
        return found

    def float64(self, mode: str) -> None:
        """Compare one mode in float64: modules and blame, outputs, state, gradients and optimiser steps."""
        is_training = mode == "train"
        reference = self.reference.get(mode) or self._torch_run(is_training=is_training)
        self.reference[mode] = reference
        self._torch_repeated(reference, mode)
        with calling(f"the JAX model cannot be called on the inputs and PyTorch's weights in {mode} mode"):
            mine = self.side.watched(self.tensors, self.inputs, is_training=is_training)
        placed, exact, notes = placing.as_torch(mine.outputs, reference.outputs)
        self.placed[mode], self.exact[mode] = placed, exact
        self.notes += [*notes, *(each.words for each in placed if each.is_same and each.words)]
        self.causes |= {each.name: each.words for each in placed if not each.is_same}
        to_targets = lambda values: tuple(each.fit.apply(values[each.index]) for each in placed)
        self._repeated(mine.outputs.floating, mode)
        modules, blame = self.findings.compare(
            mine, reference, self.tensors, self.inputs, to_targets, mode=mode, is_random=self.is_random
        )
        self.record(modules)
        self.gates += blame
        self.compare_outputs(mine.outputs.floating, reference, mode)
        self.gates += placing.exact_gates(exact, mine.outputs, reference.outputs, mode)
        self.notes += kept_state.unseen(self.tensors, reference, self.matching)
        kept_state.compare(self, mine.state, reference, mode, self.tensors)
        if mode == self.compared_modes[-1]:
            self.findings.check_called()
        if self.pair.quick:
            self.notes.append("quick: gradients, optimiser steps and narrower types were not compared")
            return
        terms = draws.terms(reference.outputs.floating, self.inputs)
        if not self.compare_gradients(self.tensors, self.inputs, terms, to_targets, reference, mode):
            return
        if self.pair.optimizers is not None and mode == self.compared_modes[-1]:
            steps.compare(self, terms, to_targets, is_training=is_training)

    def compare_outputs(self, outputs: tuple, reference: Run, kind: str) -> None:
        """Compare the floating outputs of both sides; kind: the mode, optionally with further words after a comma."""
        placed = self.placed[kind.partition(",")[0]]
        wanted = {each.name: y for each, y in zip(placed, reference.outputs.floating, strict=True)}
        mine = {each.name: each.compared(outputs) for each in placed}
        self.record(distance.compare(mine, wanted, kind=f"outputs, {kind}", has_floor=False), mine, wanted)

    def compare_gradients(
        self, tensors: Mapping[str, np.ndarray], inputs: tuple, terms: tuple, to_targets: Any, reference: Run,
        kind: str,
    ) -> bool:  # fmt: skip
        """Compare loss and gradients; return False if the PyTorch module has no gradients."""
        is_training = kind.startswith("train")
        with calling_torch("the PyTorch module's gradient cannot be taken"):
            exact = self.twin.gradients(inputs, terms, is_training=is_training)
        if exact is None:
            self.notes.append(f"gradients were not compared, {kind}: PyTorch's outputs depend on nothing that has one")
            return False
        with calling("the JAX model's gradient cannot be taken"):
            loss, grads, by_input = self.side.gradients(
                tensors, inputs, terms, to_targets=to_targets, is_training=is_training
            )
        frozen = {n for n, p in self.twin.module.named_parameters() if not p.requires_grad}
        if reached := sorted(name for name in frozen if np.any(grads[name])):
            what = "PyTorch does not train these, and gradients reach them in JAX, which stop_gradient would stop"
            self.notes.append(f"{what}: {_listed(reached)}")
        self.compare(f"loss, {kind}", {"loss": loss}, {"loss": exact.loss})
        order = sorted(self.trained(), reverse=True, key=lambda name: _order_of(name, reference))
        self.compare(f"gradients, {kind}", {n: grads[n] for n in order}, {n: exact.tensors[n] for n in order})
        sizes = [draws.sizes(x) for x in draws.arrays_of(inputs) if is_floating(x)]  # inputs may have different units
        mine, wanted = (numbered("input", map(np.multiply, each, sizes)) for each in (by_input, exact.inputs))
        self.compare(f"input gradients, {kind}", mine, wanted)
        self.gradients = exact.tensors
        return True

    def trained(self) -> frozenset[str]:
        """Return the parameters that require a gradient in PyTorch and that `names` does not leave out of JAX."""
        without = {name for name, value in self.pair.names.items() if value is None}
        return frozenset(n for n, p in self.twin.module.named_parameters() if p.requires_grad and n not in without)

    def trained_arrays(self) -> frozenset[str]:
        """Return the JAX parameters that are made from a trained tensor."""
        return frozenset(name for name in self.model.params if self.trained() & self.sources(name))

    def sources(self, name: str) -> set[str]:
        """Return the PyTorch tensors from which a JAX parameter is made."""
        rule = self.matching.rules[name]
        if isinstance(rule, Rule):
            return set(rule.sources)
        read = Read(self.tensors)
        rule(read)
        return read.names

    def _repeated(self, outputs: tuple, mode: str) -> None:
        """Gate P10: the JAX side gives the same outputs with another random key; fails where dropout is left on."""
        side = self._side("float64")
        side.model = opened(self.pair, self.inputs, key=1)
        again = side.run(self.tensors, self.inputs, is_training=mode == "train")
        error = placing.repeat_error(again, outputs)
        self.gates.append(
            gates.Gate("P10", f"JAX repeats itself with another random key, {mode}", error == 0.0, error, 0.0)
        )
        if error:
            self.causes[capture.ROOT] = f"random numbers in the JAX model in {mode} mode: dropout left on"

    def _torch_run(self, *, is_training: bool) -> Run:
        mode = "train" if is_training else "eval"
        with calling_torch(f"the PyTorch module cannot be called on the inputs in {mode} mode"):
            return self.twin.run(self.inputs, is_training=is_training)

    def _torch_repeated(self, reference: Run, mode: str) -> None:
        """Add a failed gate P10 if the PyTorch module is random; causes cannot be tried on such a module."""
        again = self._torch_run(is_training=mode == "train")
        error = placing.repeat_error(again.outputs.floating, reference.outputs.floating)
        if error > distance.TOLERANCE_FLOAT64:
            self.is_random = True
            limit = distance.TOLERANCE_FLOAT64
            self.gates.append(gates.Gate("P10", f"PyTorch repeats itself, {mode}", False, error, limit))
            self.causes["PyTorch"] = (
                f"the PyTorch module is random in {mode} mode, or keeps state between calls: dropout left on, such as "
                "F.dropout, or a cache"
            )

    def reduced(self, dtype: str) -> None:
        """Gate P2: in a narrower type, both sides have similar errors against float64."""
        twin = TorchSide(self.pair.torch_module, dtype=dtype, pick=self.pair.torch_outputs)
        twin.load(self.tensors)
        theirs = twin.run(self.inputs, is_training=False).outputs.floating
        outputs = self._side(dtype).run(self.tensors, self.inputs, is_training=False)
        placed = next(iter(self.placed.values()))
        mine = [distance.widest(each.fit.apply(outputs[each.index])) for each in placed]
        mine, theirs, wanted = (numbered("output", x) for x in (mine, theirs, self.reference["eval"].outputs.floating))
        ratio = distance.compare_errors(
            mine, theirs, wanted,
            kind=f"outputs, {dtype}", dtype=dtype, slack_epsilons=gates.SLACK_EPSILONS["outputs", dtype],
            is_single_draw=True,
        )  # fmt: skip
        self.comparisons[ratio.kind] = ratio
        shown = ratio.first_failure or ratio.worst
        self.gates.append(gates.from_ratio(ratio, what=ratio.kind)._replace(limit=shown.limit))

    def compare(
        self, kind: str, values: Mapping[str, Any], wanted: Mapping[str, Any], *, gate: str = "P1",
        has_floor: bool = True,
    ) -> str | None:  # fmt: skip
        """Compare and record; return the name of the first that differs."""
        comparison = distance.compare(values, wanted, kind=kind, has_floor=has_floor)
        return self.record(comparison, values, wanted, gate=gate)

    def record(
        self, comparison: distance.Comparison, values: Mapping[str, Any] | None = None,
        wanted: Mapping[str, Any] | None = None, *, gate: str = "P1",
    ) -> str | None:  # fmt: skip
        """Record a comparison and its gate; return the name of the first that differs."""
        self.comparisons[comparison.kind] = comparison
        made = gates.from_comparison(gate, comparison)
        if wanted and not np.isfinite(made.error):
            words = placing.not_finite(values[made.where], wanted[made.where])
            made = made._replace(where=f"{made.where}: {words}") if words else made
        self.gates.append(made)
        return comparison.first_failure and comparison.first_failure.name

    def result(self) -> Result:
        """Collect the findings as a Result."""
        found = self.findings
        return Result(
            tuple(self.gates), self.matching, found.modules, self.comparisons, self.model.framework,
            tuple(found.local), tuple(found.blamed), found.starts, found.causes | self.causes,
            tuple(dict.fromkeys(self.notes)),
        )  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if names[MAX_SHOWN:] else "")


def _module(call: str) -> str:
    return call.partition("#")[0]


def _order_of(name: str, reference: Run) -> int:
    """Return the position of a weight's module in the order of completion; -1 where it was not called."""
    order = {call.module: i for i, call in enumerate(reference.calls.values())}
    return order.get(name.rpartition(".")[0], -1)


def opened(pair: Pair, inputs: tuple, *, key: int) -> JaxModel:
    """Open the pair's JAX model; its random draws start from this key."""
    return open_model(pair.jax_side, example_of(pair, inputs), Options(pair.jax_call, pair.jax_modes, key))


def example_of(pair: Pair, inputs: tuple) -> tuple:
    """Return the inputs of one call of the pair's JAX model."""
    example = (pair.jax_inputs or (lambda *inputs: inputs))(*inputs)
    return jax.tree.map(lambda x: x[0], example) if pair.per_example else example
