"""The proof for one pair: weights, outputs, gradients, state and optimiser steps in float64, then narrower types."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jaxbench import libtpu
from jaxbench.pair import alignment, causes
from jaxbench.pair.contract import Pair, Result
from jaxbench.pair.jax_model import JaxModel, Options, calling, is_floating, open_model
from jaxbench.pair.jax_side import JaxSide
from jaxbench.pair.leaves import disturbed, leaves_of
from jaxbench.pair.matching import TURNED, Matching, match, near
from jaxbench.pair.pair_file import first_line
from jaxbench.pair.rules import Read, Rule, to_torch
from jaxbench.pair.torch_side import Run, TorchSide, torch_leaves, wide
from jaxbench.pair.widening import widened
from jaxbench.parity import capture, distance, gates
from jaxbench.parity.run import pinned

STATISTICS = (torch.nn.modules.batchnorm._NormBase,)
TARGET_SEED = 0  # of the outputs that the objective asks for
MAX_SHOWN = 6  # names in a note
MAX_CAUSES = 8  # modules for which a cause is looked for
DROPOUT = (torch.nn.modules.dropout._DropoutNd,)


class Weights(NamedTuple):
    """Weights of both models, and which of them are trained."""

    tensors: dict[str, np.ndarray]  # PyTorch's parameters and buffers
    arrays: dict[str, np.ndarray]  # the JAX model's, made of them; what is not here keeps its own
    trained_tensors: frozenset[str]
    trained_arrays: frozenset[str]
    is_training: bool  # whether gradients were compared in training mode
    outputs: tuple[np.ndarray, ...] = ()  # PyTorch's in float64, in evaluation mode


def run(pair: Pair) -> Result:
    """Every gate of a pair, on the CPU."""
    libtpu.leave_out_if_absent()
    with jax.default_device(jax.devices("cpu")[0]):
        return _run(_Work(pair))


def weights(pair: Pair) -> Weights:
    """What both models are given, found as the proof finds it."""
    libtpu.leave_out_if_absent()
    with jax.default_device(jax.devices("cpu")[0]):
        work = _Work(pair)
        with pinned("float64"):
            work.open()
            arrays = {name: np.asarray(x) for name, x in work.matching.to_jax(work.tensors).items()}
        trained, rules, outputs = work.trained(), work.matching.rules, work.reference["eval"].outputs.floating
        names = frozenset(
            name for name in work.model.params
            if name not in rules or not isinstance(rules[name], Rule) or trained & set(rules[name].sources)
        )  # fmt: skip
        return Weights(work.tensors, arrays, trained, names, work.modes()[-1] == "train", outputs)


def _run(work: _Work) -> Result:
    pair = work.pair
    with pinned("float64"), widened() if pair.widen else contextlib.nullcontext():
        work.open()
        work.compared_modes = work.modes()
        for mode in work.compared_modes:
            work.float64(mode)
    is_equal = all(gate.passed for gate in work.gates)  # narrower types say nothing of two functions
    for dtype in pair.dtypes if is_equal and not pair.quick else ():
        with pinned(dtype):
            try:
                work.reduced(dtype)
            except (NotImplementedError, TypeError, RuntimeError) as error:  # an operation without this type
                work.notes.append(f"{dtype} was not compared: {first_line(error)}")
    return work.result()


class _Work:
    """Gates and findings of one run, as they come."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.inputs = wide(pair.inputs)
        self.gates: list[gates.Gate] = []
        self.comparisons: dict[str, Any] = {}
        self.local: list[capture.Local] = []
        self.blamed: list[capture.Local] = []
        self.starts: str | None = None
        self.causes: dict[str, str] = {}
        self.notes: list[str] = ["casts inside both models were taken as casts to float64"] if pair.widen else []
        self.seen: set[str] = set()  # modules and taps of JAX that were called
        self.is_random = False  # the PyTorch module, in any mode so far
        self.placed: dict[str, list[alignment.Placed]] = {}  # outputs by mode

    def open(self) -> None:
        """Take both models apart, match their weights and give both the same."""
        pair = self.pair
        self.twin = TorchSide(pair.torch_module, dtype="float64", pick=pair.torch_outputs)
        with calling("the JAX model cannot be called on the inputs"):
            self.model = opened(pair, self.inputs, key=0)
        self.reference = {"eval": self._torch_run(is_training=False)}
        self.matching = self._matched()
        if pair.weights == "jax":
            arrays = {name: distance.widest(x) for name, x in {**self.model.params, **self.model.state}.items()}
            shapes = {name: x.shape for name, x in self.twin.tensors().items()}
            self.twin.load(to_torch(self.matching.rules, arrays, shapes))
            self.reference = {"eval": self.twin.run(self.inputs, is_training=False)}
        if pair.weights == "own":
            turned = [guess for guess in self.matching.guesses if guess.why == TURNED]
            self.notes += [f"{guess.name} has the values of {guess.rule.text()} of PyTorch's" for guess in turned]
            own = {name: distance.widest(x) for name, x in {**self.model.params, **self.model.state}.items()}
            theirs = {name: np.asarray(x) for name, x in self.matching.to_jax(self.twin.tensors()).items()}
            self._compare("weights", own, theirs, gate="P5", tolerance=1e-6)
        elif pair.disturb:
            self._disturb()
        self.tensors = self.twin.tensors()
        self.side = self._side("float64")

    def _disturb(self) -> None:
        """Make constant tensors that the JAX model gets random, in the twin alone; the caller's module stays."""
        read = Read(self.twin.tensors())
        with calling("names: a function of the tensors fails"):
            self.matching.to_jax(read)
        before, own = self.reference["eval"], self.twin.tensors()
        names = self.twin.disturb(read.names)
        if not names:
            return
        shown = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if names[MAX_SHOWN:] else "")
        self.reference = {"eval": self._torch_run(is_training=False)}
        if alignment.count_not_finite(self.reference["eval"].outputs) > alignment.count_not_finite(before.outputs):
            self.twin.load(own)
            self.reference = {"eval": before}
            what = "keep their values, as others give no number"
        else:
            what = "were compared with random values"
        self.notes.append(f"constant tensors, which hide slips, {what}: {shown}")

    def _matched(self) -> Matching:
        """The weights' matching; both models are called once, so that order of use can speak."""
        with_values, calls = self.pair.weights == "own", self.reference["eval"].calls
        probe = arrays = {**self.model.params, **self.model.state}
        if self.pair.disturb:
            probe = arrays | disturbed({name: x for name, x in arrays.items() if is_floating(x)})
            calls = self.twin.probed(self.inputs)
        with calling("the JAX model cannot be called on the inputs"):
            watched = self._side("float64", self_made=probe).watched({}, self.inputs, is_training=False)
        mine = leaves_of(self.model, watched.calls, watched.order, with_values=with_values)
        names = {n: value for n, value in self.pair.names.items() if not _is_module(n, value, arrays, self.twin)}
        return match(mine, torch_leaves(self.twin, calls, with_values=with_values), names)

    def _side(self, dtype: str, *, self_made: Mapping[str, Any] | None = None) -> JaxSide:
        """The JAX side with PyTorch's weights, or with its own."""
        pair = self.pair
        to_jax = self.matching.to_jax if self_made is None else lambda tensors: self_made
        return JaxSide(
            self.model, to_jax, dtype=dtype, to_inputs=pair.jax_inputs, pick=pair.jax_outputs,
            per_example=pair.per_example,
        )  # fmt: skip

    def modes(self) -> tuple[str, ...]:
        """Modes to compare: evaluation, and training where the module behaves otherwise there."""
        if self.pair.modes is not None:
            return self.pair.modes
        modules = list(self.twin.module.modules())
        active = [m for m in modules if isinstance(m, DROPOUT) and m.p > 0]
        has_statistics = any(isinstance(m, STATISTICS) and m.track_running_stats for m in modules)
        if active:
            note = f"training mode was not compared: dropout p={active[0].p} in {len(active)} modules draws at random"
            self.notes.append(note + "; set it to 0 on both sides")
        return ("eval", "train") if has_statistics and not active else ("eval",)

    def float64(self, mode: str) -> None:
        """Blame, outputs, gradients, state and optimiser steps of one mode."""
        is_training = mode == "train"
        reference = self.reference.get(mode) or self._torch_run(is_training=is_training)
        self.reference[mode] = reference
        self._torch_repeated(reference, mode)
        with calling(f"the JAX model cannot be called on the inputs and PyTorch's weights in {mode} mode"):
            mine = self.side.watched(self.tensors, self.inputs, is_training=is_training)
        self.seen |= {*mine.order, *(name.partition("#")[0] for name in mine.calls)}
        placed, exact, notes = alignment.as_torch(mine.outputs, reference.outputs)
        self.placed.setdefault(mode, placed)
        self.notes += [*notes, *(each.words for each in placed if each.is_same and each.words)]
        self.causes |= {each.name: each.words for each in placed if not each.is_same}
        to_targets = lambda values: tuple(each.fit.apply(values[each.index]) for each in placed)
        self._repeated(mine.outputs.floating, mode)
        self._modules(mine.calls, reference, to_targets, mode)
        wanted = {each.name: y for each, y in zip(placed, reference.outputs.floating, strict=True)}
        self._compare(f"outputs, {mode}", {each.name: each.compared(mine.outputs.floating) for each in placed}, wanted)
        self.gates += alignment.exact_gates(exact, mine.outputs, reference.outputs, mode)
        if is_training and self.model.state:
            self._state(mine.state, reference)
        if mode == self.compared_modes[-1]:
            self._check_modules()
        if self.pair.quick:
            return
        targets = self._targets(reference)
        with calling("the PyTorch module's gradient cannot be taken"):
            exact = self.twin.gradients(self.inputs, targets, is_training=is_training)
        with calling("the JAX model's gradient cannot be taken"):
            loss, grads, by_input = self.side.gradients(
                self.tensors, self.inputs, targets, to_targets=to_targets, is_training=is_training
            )
        self._compare(f"loss, {mode}", {"loss": loss}, {"loss": exact.loss})
        order = sorted(self.trained(), reverse=True, key=lambda name: _order_of(name, reference))
        self._compare(f"gradients, {mode}", {n: grads[n] for n in order}, {n: exact.tensors[n] for n in order})
        self._compare(f"input gradients, {mode}", _numbered("input", by_input), _numbered("input", exact.inputs))
        if self.pair.optimizers is not None and mode == self.compared_modes[-1]:
            self._steps(targets, to_targets, is_training)

    def trained(self) -> frozenset[str]:
        """Parameters that PyTorch trains and that the JAX model has, as far as the caller says."""
        without = {name for name, value in self.pair.names.items() if value is None}
        return frozenset(n for n, p in self.twin.module.named_parameters() if p.requires_grad and n not in without)

    def _state(self, state: Mapping[str, Any], reference: Run) -> None:
        """Batch statistics after a call in training mode."""
        after = self.matching.to_jax(self.tensors | reference.buffers)
        names = [name for name in self.model.state if name in after]
        mine, theirs = ({n: np.asarray(tree[n]) for n in names} for tree in (state, after))
        if self._compare("state after a call, train", mine, theirs):
            before = {n: np.asarray(x) for n, x in self.matching.to_jax(self.tensors).items()}
            words = causes.of_state(mine, theirs, before, self._counts(names, reference))
            self.causes |= {"state": words} if words else {}

    def _counts(self, names: list[str], reference: Run) -> dict[str, int]:
        """Values that each batch statistic is taken over: those of the module's input in one channel."""
        inputs = {call.module: call.call.inputs[0] for call in reference.calls.values() if call.call.inputs}
        rules = {name: self.matching.rules[name] for name in names if isinstance(self.matching.rules[name], Rule)}
        modules = {name: rule.sources[0].rpartition(".")[0] or capture.ROOT for name, rule in rules.items()}
        return {name: inputs[m].size // inputs[m].shape[1] for name, m in modules.items() if m in inputs}

    def _targets(self, reference: Run) -> tuple[np.ndarray, ...]:
        random = np.random.default_rng(TARGET_SEED)
        drawn = [(y, _normal(random, y)) for y in reference.outputs.floating]
        return tuple(np.where(np.isinf(y), np.nan, target) for y, target in drawn)  # infinities have no objective

    def _repeated(self, outputs: tuple, mode: str) -> None:
        """Gate P10: the JAX side gives the same outputs for another random key; dropout left on shows here."""
        side = self._side("float64")
        side.model = opened(self.pair, self.inputs, key=1)
        again = side.run(self.tensors, self.inputs, is_training=mode == "train")
        error = alignment.repeat_error(again, outputs)
        self.gates.append(
            gates.Gate("P10", f"JAX repeats itself with another random key, {mode}", error == 0.0, error, 0.0)
        )
        if error:
            self.causes[capture.ROOT] = f"random numbers in the JAX model in {mode} mode: dropout left on"

    def _torch_run(self, *, is_training: bool) -> Run:
        with calling(f"the PyTorch module cannot be called on the inputs in {'train' if is_training else 'eval'} mode"):
            return self.twin.run(self.inputs, is_training=is_training)

    def _torch_repeated(self, reference: Run, mode: str) -> None:
        """Gate P10 of a PyTorch module that draws at random, which no cause can be tried on; none where it does not."""
        again = self._torch_run(is_training=mode == "train")
        error = alignment.repeat_error(again.outputs.floating, reference.outputs.floating)
        if error > distance.TOLERANCE_FLOAT64:
            self.is_random = True
            limit = distance.TOLERANCE_FLOAT64
            self.gates.append(gates.Gate("P10", f"PyTorch repeats itself, {mode}", False, error, limit))
            self.causes["PyTorch"] = f"the PyTorch module is random in {mode} mode: dropout left on, such as F.dropout"

    def _check_modules(self) -> None:
        """Check that every module of `names` was called.

        Raises:
          ValueError: one was not, in no mode.
        """
        for name, value in self.pair.names.items():
            if _is_module(name, value, self.model.params | self.model.state, self.twin) and name not in self.seen:
                raise ValueError(
                    f"names={{{name!r}: {value!r}}}: no such JAX array, and no such module or tap was called"
                    f"{near(name, {*self.seen, *self.model.params})}"
                )

    def _modules(self, calls: Mapping[str, capture.Call], reference: Run, to_targets: Any, mode: str) -> None:
        """Blame by teacher forcing, and the first module whose output differs."""
        is_training = mode == "train"
        rooted = lambda calls: {**calls, capture.ROOT: capture.Call((), to_targets(calls[capture.ROOT].outputs)[:1])}
        calls = rooted(calls)
        theirs = {name: call.call for name, call in reference.calls.items()}
        theirs[capture.ROOT] = capture.Call((), reference.outputs.floating[:1])
        modules = {a: b for a, b in self.pair.names.items() if _is_module(a, b, self.model.params, self.twin)}
        names = alignment.modules(calls, theirs, self.matching, modules)
        twin = alignment.aligned(calls, theirs, names)
        self.modules = twin.torch_names
        outputs = {name: np.asarray(calls[name].outputs[0]) for name in twin.calls}
        wanted = {
            name: call.outputs[0] if call.outputs else np.asarray(theirs[names[name]].outputs[0])
            for name, call in twin.calls.items()
        }
        starts = self._compare(f"modules, {mode}", outputs, wanted)
        if self.starts is None:
            self.starts = starts
        forced = rooted(self.side.forced(self.tensors, self.inputs, twin.calls, is_training=is_training))
        local = alignment.local_errors(forced, twin.calls)
        if local:
            self.gates.append(gates.blame(local)._replace(what=f"every module by itself, {mode}"))
        if self.blamed:
            return  # by an earlier mode
        self.local = local
        self.blamed = [entry for entry in local if not entry.error <= distance.TOLERANCE_FLOAT64]
        for entry in self._distinct()[:MAX_CAUSES] if not self.is_random else ():
            words = causes.likely(entry, twin, forced, self.twin, reference, is_training=is_training)
            if words:
                self.causes.setdefault(entry.module, words)

    def _distinct(self) -> list[capture.Local]:
        """First thing to blame in every module."""
        return list({entry.module: entry for entry in reversed(self.blamed)}.values())[::-1]

    def _steps(self, targets: tuple, to_targets: Any, is_training: bool) -> None:
        """Gate P7 and P1 of optimiser steps on one batch."""
        transformation, optimizer = self.pair.optimizers
        options = {"num_steps": self.pair.num_steps, "is_training": is_training}
        wanted_losses, wanted = self.twin.steps(self.inputs, targets, optimizer, **options)
        trained = self.trained()
        losses, params = self.side.steps(
            self.tensors, trained, self.inputs, targets, transformation, to_targets=to_targets, **options
        )
        self._compare(
            "losses of optimiser steps", _numbered("step", losses), _numbered("step", wanted_losses), gate="P7"
        )
        kind = f"parameters after {self.pair.num_steps} steps"
        self._compare(kind, params, {name: wanted[name] for name in params})

    def reduced(self, dtype: str) -> None:
        """Gate P2: both sides' errors against float64 are alike in a narrower type."""
        twin = TorchSide(self.pair.torch_module, dtype=dtype, pick=self.pair.torch_outputs)
        twin.load(self.tensors)
        theirs = twin.run(self.inputs, is_training=False).outputs.floating
        outputs = self._side(dtype).run(self.tensors, self.inputs, is_training=False)
        placed = next(iter(self.placed.values()))
        mine = [distance.widest(each.fit.apply(outputs[each.index])) for each in placed]
        mine, theirs, wanted = (_numbered("output", x) for x in (mine, theirs, self.reference["eval"].outputs.floating))
        ratio = distance.compare_errors(
            mine, theirs, wanted,
            kind=f"outputs, {dtype}", dtype=dtype, slack_epsilons=gates.SLACK_EPSILONS["outputs", dtype],
        )  # fmt: skip
        self.comparisons[ratio.kind] = ratio
        self.gates.append(gates.from_ratio(ratio, what=ratio.kind))

    def _compare(
        self, kind: str, values: Mapping[str, Any], wanted: Mapping[str, Any], *, gate: str = "P1",
        tolerance: float = distance.TOLERANCE_FLOAT64,
    ) -> str | None:  # fmt: skip
        """Record a comparison and its gate; name of the first that differs."""
        comparison = distance.compare(values, wanted, kind=kind, tolerance=tolerance)
        self.comparisons[kind] = comparison
        made = gates.from_comparison(gate, comparison)
        if not np.isfinite(made.error) and (words := alignment.not_finite(values[made.where], wanted[made.where])):
            made = made._replace(where=f"{made.where}: {words}")
        self.gates.append(made)
        return comparison.first_failure and comparison.first_failure.name

    def result(self) -> Result:
        """What was found."""
        return Result(
            tuple(self.gates), self.matching, self.modules, self.comparisons, self.model.framework, tuple(self.local),
            tuple(self.blamed), self.starts, self.causes,
            tuple(dict.fromkeys(self.notes)),
        )  # fmt: skip


def _numbered(name: str, values: Any) -> dict[str, Any]:
    return {f"{name} {i}": value for i, value in enumerate(values)}


def _normal(random: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Normal numbers of another array's shape; complex where it is."""
    drawn = random.standard_normal(like.shape)
    return drawn + 1j * random.standard_normal(like.shape) if np.iscomplexobj(like) else drawn


def _is_module(name: str, value: Any, arrays: Mapping[str, Any], twin: TorchSide) -> bool:
    """True for an entry of `names` that speaks of modules, or taps, and not of weights."""
    modules = dict(twin.module.named_modules())
    return isinstance(value, str) and name not in arrays and (value in modules or value == capture.ROOT)


def _order_of(name: str, reference: Run) -> int:
    """Place of a weight's module in the order of completion."""
    order = {call.module: i for i, call in enumerate(reference.calls.values())}
    return order.get(name.rpartition(".")[0], -1)


def opened(pair: Pair, inputs: tuple, *, key: int) -> JaxModel:
    """The JAX model taken apart; its random draws start from a key."""
    example = (pair.jax_inputs or (lambda *inputs: inputs))(*inputs)
    if pair.per_example:
        example = jax.tree.map(lambda x: x[0], example)
    return open_model(pair.jax_side, example, Options(pair.jax_call, pair.jax_modes, key))
