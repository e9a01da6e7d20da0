"""Compare the modules inside both models: which differ, which are to blame, which only split the work differently."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxbench.pair import alignment, causes
from jaxbench.pair.jax_model import JaxModel
from jaxbench.pair.jax_side import JaxSide, Watched
from jaxbench.pair.matching import Matching, near
from jaxbench.pair.public_types import Pair
from jaxbench.pair.torch_side import Run, TorchCall, TorchSide
from jaxbench.parity import capture, distance, gates
from jaxbench.parity.capture import ROOT, Call

MAX_CAUSES = 8  # modules for which a cause is looked for
MAX_SHOWN = 6  # modules in a note
TOLERANCE = distance.TOLERANCE_FLOAT64


class _Forced(NamedTuple):
    """JAX's calls on PyTorch's tensors (teacher forcing), and every module's own errors in them."""

    twin: alignment.Aligned
    calls: dict[str, Call]
    errors: list[capture.LocalError]


class _Calls(NamedTuple):
    """Both sides' calls in one mode, and JAX's repeated with modules forced to PyTorch's tensors."""

    mine: dict[str, Call]
    theirs: dict[str, Call]
    pairs: dict[str, str]  # JAX call -> PyTorch call
    compared: dict[str, str]  # those of pairs that the caller does not leave out
    force: Callable[[Mapping[str, Call]], dict[str, Call]]  # PyTorch's calls by JAX's name -> JAX's calls, forced

    def forced(self, in_order: frozenset[str] = frozenset(), with_whole: frozenset[str] = frozenset()) -> _Forced:
        """Force every compared module; those in in_order get their inputs in PyTorch's order, others its integers."""
        twin = alignment.aligned(self.mine, self.theirs, self.compared, in_order=in_order, with_whole=with_whole)
        calls = self.force(twin.calls)
        return _Forced(twin, calls, alignment.local_errors(calls, twin.calls))

    def differs(self, name: str) -> bool:
        """True if JAX's module got other integers than PyTorch's."""
        mine, wanted = self.mine[name], alignment.whole_inputs(self.mine[name], self.theirs[self.compared[name]])
        return any(np.any(np.asarray(a) != b) for a, b in zip(mine.whole, wanted, strict=False))

    def left_free(
        self, twin: alignment.Aligned, freed: frozenset[str], *, is_forced_outside: bool
    ) -> list[capture.LocalError]:
        """Return the errors where some modules are not forced: real inputs in, own outputs passed on.

        Modules that the caller leaves out are free too, or with is_forced_outside forced to PyTorch's outputs.
        """
        given = {name: call for name, call in twin.calls.items() if name not in freed}
        outside = alignment.aligned(self.mine, self.theirs, self.pairs).calls if is_forced_outside else {}
        outside = {name: call for name, call in outside.items() if name not in self.compared}
        return alignment.local_errors(self.force(outside | given), given)


class _Difference(NamedTuple):
    """One mode in which modules differ by themselves."""

    errors: list[capture.LocalError]
    calls: _Calls
    twin: alignment.Aligned


class _Evidence(NamedTuple):
    """Input to the search for causes."""

    twin: alignment.Aligned
    calls: dict[str, Call]  # JAX's, forced
    reference: Run
    is_training: bool


class ModuleFindings:
    """Findings on the modules so far; local errors and blame are from the first mode in which a module is to blame."""

    def __init__(self, pair: Pair, model: JaxModel, twin: TorchSide, matching: Matching, side: JaxSide):
        self.pair, self.model, self.twin, self.matching, self.side = pair, model, twin, matching, side
        self.tensor_names = frozenset(twin.tensors())
        self.local: list[capture.LocalError] = []
        self.blamed: list[capture.LocalError] = []
        self.apart: dict[str, bool] = {}  # modules whose outputs fit no common shape; True if their inputs agree
        self.suspects: set[str] = set()  # modules of `apart` after which values differ
        self.words: dict[str, str] = {}  # cause in words of modules of `apart` that are not to blame
        self.starts: str | None = None
        self.causes: dict[str, str] = {}
        self.modules: dict[str, str] = {}  # JAX call -> PyTorch call
        self.gates: list[str] = []  # names of the modules' gates
        self.seen: set[str] = set()  # modules and taps of JAX that were called
        self.differing: list[_Difference] = []
        self.evidence: _Evidence | None = None  # of the mode of `local`; None if the PyTorch module is random

    def compare(
        self, mine: Watched, reference: Run, tensors: Mapping[str, np.ndarray], inputs: tuple,
        to_targets: Callable[[tuple], tuple], *, mode: str, is_random: bool,
    ) -> tuple[distance.Comparison, list[gates.Gate]]:  # fmt: skip
        """Compare the modules' outputs, and what every module computes on its twin's inputs (teacher forcing)."""
        rooted = lambda calls: {**calls, ROOT: Call((), to_targets(calls[ROOT].outputs))}
        self.seen |= {*mine.order, *(name.partition("#")[0] for name in mine.calls)}
        mine_calls = rooted(mine.calls)
        theirs = {name: call.call for name, call in reference.calls.items()}
        theirs[ROOT] = Call((), reference.outputs.floating)
        pairs = alignment.modules(mine_calls, theirs, self.matching, self._given())
        names = {a: b for a, b in pairs.items() if not self._is_left_out(a) and not self._is_left_out(b)}
        is_training = mode == "train"
        force = lambda given: rooted(self.side.forced(tensors, inputs, given, is_training=is_training))
        calls = _Calls(mine_calls, theirs, pairs, names, force)
        forced = _best_order(calls)
        self.modules = forced.twin.torch_names
        comparison = _outputs(mine_calls, forced.twin, kind=f"modules, {mode}")
        blame, every = self._blame(forced.twin, forced.errors, mode)
        if self.starts is None and comparison.first_failure:
            self.starts = comparison.first_failure.name.partition(" (")[0]
        if every:
            self.differing.append(_Difference(every, calls, forced.twin))
        if not self.blamed:  # no earlier mode found any
            self.local, self.blamed = forced.errors, every
            self.evidence = None if is_random else _Evidence(forced.twin, forced.calls, reference, is_training)
            if self.evidence:
                self._explain(every)
        return comparison, blame

    def _blame(
        self, twin: alignment.Aligned, local: list[capture.LocalError], mode: str
    ) -> tuple[list[gates.Gate], list[capture.LocalError]]:
        """Return the gate of modules by themselves, and what to blame; modules without a common shape go to `apart`."""
        apart = {name for name, call in twin.calls.items() if call.outputs and call.outputs[0] is None}
        whole = {name: all(x is not None for x in twin.calls[name].inputs) for name in apart}
        compared = _without_first_outputs(local, apart)
        for entry in compared:
            if entry.child in whole and entry.error > TOLERANCE:
                whole[entry.child] = False
        self.apart |= whole
        self.suspects |= {name for name in apart if _is_followed_by_an_error(name, twin, local)}
        gate = gates.blame(compared)._replace(what=f"every module by itself, {mode}")
        self.gates += [f"modules, {mode}", gate.what]
        return [gate], [entry for entry in compared if not entry.error <= TOLERANCE]

    def _explain(self, entries: list[capture.LocalError]) -> None:
        """Look for causes of the first modules to blame, in PyTorch's first output or in what a module passes on."""
        twin, made, reference, is_training = self.evidence
        first = {name: _first(twin.calls[name], reference.calls.get(other)) for name, other in twin.torch_names.items()}
        chosen = {name: made[name] for name in first if name in made}
        chosen = {name: Call(call.inputs, call.outputs[first[name] :][:1]) for name, call in chosen.items()}
        explained: dict[str, capture.LocalError] = {}
        for entry in entries:
            if entry.child is not None or entry.output == first.get(entry.module):
                explained.setdefault(entry.module, entry)
        for module, entry in list(explained.items())[:MAX_CAUSES]:
            words = _other_integers(entry, twin, made)
            words = words or causes.likely(entry, twin, chosen, self.twin, reference, is_training=is_training)
            if words:
                self.causes.setdefault(module, words)

    def distinct(self) -> list[capture.LocalError]:
        """Return the first thing to blame in every module."""
        return list({entry.module: entry for entry in reversed(self.blamed)}.values())[::-1]

    def check_called(self) -> None:
        """Check that every module in `names` was called.

        Raises:
          ValueError: one was called in no mode.
        """
        for name, value in self.pair.names.items():
            if is_module(name, value, self.model, self.twin) and name not in self.seen and value is not None:
                raise ValueError(
                    f"names={{{name!r}: {value!r}}}: no such JAX array, and no such module or tap was called"
                    f"{near(name, {*self.seen, *self.model.params})}"
                )

    def _given(self) -> dict[str, str]:
        names = self.pair.names.items()
        return {a: b for a, b in names if b is not None and is_module(a, b, self.model, self.twin)}

    def _is_left_out(self, call: str) -> bool:
        """True for a call of a module that `names` leaves out, or of one inside it."""
        module = call.partition("#")[0]  # a tensor that JAX lacks may have a module's name
        left = [name for name, value in self.pair.names.items() if value is None and name not in self.tensor_names]
        return module != ROOT and any(module == name or module.startswith(f"{name}.") for name in left)

    def is_taken_back(self) -> bool:
        """True if, in every mode, nothing else differs once the modules that differ are not forced.

        A residual added inside a module on one side and around it on the other makes the modules differ by themselves,
        but nothing after them: the same function, split into modules differently. A bug that a later module hides,
        such as a scale before a norm, still shows as a difference in the norm's input.
        """
        return all(self._is_taken_back(difference) for difference in self.differing)

    def _is_taken_back(self, difference: _Difference) -> bool:
        errors, calls, twin = difference
        freed = frozenset(entry.module for entry in errors if entry.child is None) - {ROOT}
        ways = (False, True) if len(calls.compared) < len(calls.pairs) else (False,)
        left = (calls.left_free(twin, freed, is_forced_outside=each) for each in ways)
        return any(all(e.error <= TOLERANCE for e in _without_first_outputs(each, self.apart)) for each in left)

    def blame_apart(self) -> None:
        """Look for causes also in modules whose output shapes differ, because the whole functions differ.

        A correct module may have another shape too, such as a convolution with wide padding whose output is cropped
        later. To blame are those after which the next values differ, or all of them where there is nothing else to
        blame.
        """
        found = [capture.LocalError(name, np.inf) for name, is_same in self.apart.items() if is_same]
        if self.evidence:
            self._explain([entry for entry in found if entry.module in self.evidence.twin.calls])
        to_blame = [entry for entry in found if entry.module in self.suspects or not self.blamed]
        self.words = {entry.module: self.causes.pop(entry.module, "") for entry in found if entry not in to_blame}
        self.starts = self.starts or next((entry.module for entry in to_blame), None)
        self.blamed += to_blame

    def forgive(self, num_draws: int, what: str) -> list[str]:
        """Clear the blame, because the whole functions agree; return notes on what differs inside."""
        notes = []
        if self.blamed:
            shown = [f"{e.module} ({e.part}, {e.error:.1e})" for e in self.distinct()]
            notes.append(
                f"modules differ inside, and {what} agree all the same on {num_draws} draws of weights and inputs, so "
                f"the same function is cut otherwise: {_listed(shown)}"
            )
        for entry in self.blamed:
            self.causes.pop(entry.module, None)
        self.blamed, self.starts = [], None
        return notes

    def apart_note(self) -> list[str]:
        """Return a note on modules that were not compared by themselves."""
        shown = [_with_twin(name, self.modules.get(name)) for name in self.apart]
        shown = [f"{each}: {words}" if (words := self.words.get(name)) else each
                 for each, name in zip(shown, self.apart, strict=True)]  # fmt: skip
        words = "modules not compared by themselves, as no layout gives both outputs one shape: "
        return [words + _listed(shown)] if shown else []


def _without_first_outputs(errors: list[capture.LocalError], modules: Container[str]) -> list[capture.LocalError]:
    return [entry for entry in errors if entry.module not in modules or not entry.is_first_output]


def _best_order(calls: _Calls) -> _Forced:
    """Run the forced calls with each module's inputs in the order that explains its output.

    Inputs that are nearest in another order than PyTorch's have two explanations. Either the module takes its arguments
    in another order, or its caller passes them in the wrong order: then the module is correct on PyTorch's order.
    """
    own = lambda forced: {entry.module: entry.error for entry in forced.errors if entry.is_first_output}
    first = calls.forced()
    errors = own(first)
    handed = frozenset(
        name for name in calls.compared if not errors.get(name, 0.0) <= TOLERANCE and calls.differs(name)
    )
    if handed:  # other integers, such as positions: the caller's slip where the module is right on PyTorch's
        errors = own(calls.forced(with_whole=handed))
        handed = frozenset(name for name in handed if errors.get(name, np.inf) <= TOLERANCE)
        first = calls.forced(with_whole=handed) if handed else first
        errors = own(first)
    suspects = frozenset(name for name in first.twin.reordered if not errors.get(name, 0.0) <= TOLERANCE)
    if not suspects:
        return first
    second = calls.forced(suspects, handed)
    errors = own(second)
    right = frozenset(name for name in suspects if errors.get(name, np.inf) <= TOLERANCE)
    return second if right == suspects else calls.forced(right, handed) if right else first


def _other_integers(entry: capture.LocalError, twin: alignment.Aligned, made: Mapping[str, Call]) -> str:
    """Describe the first integer handed to a module that differs; empty where there is none."""
    mine, wanted = (calls[entry.child].whole if entry.child in calls else () for calls in (made, twin.calls))
    for a, b in zip(mine, wanted, strict=False):
        if np.any(places := np.asarray(a) != b):
            at = tuple(int(i) for i in np.argwhere(places)[0])
            return f"other integers are handed over: {np.asarray(a)[at]} in JAX, {b[at]} in PyTorch at {list(at)}"
    return ""


def _is_followed_by_an_error(name: str, twin: alignment.Aligned, local: list[capture.LocalError]) -> bool:
    """True if what the enclosing module next makes of a module's output differs, or has no common shape."""
    around = capture.enclosing_module(name, twin.calls)
    place = next(i for i, entry in enumerate(local) if entry.module == name and entry.is_first_output)
    following = next((entry for entry in local[place + 1 :] if entry.module == around), None)
    if following is None:
        return True
    if not following.error <= TOLERANCE:
        return True
    return following.child is not None and any(x is None for x in twin.calls[following.child].inputs)


def _outputs(calls: Mapping[str, Call], twin: alignment.Aligned, *, kind: str) -> distance.Comparison:
    mine, wanted = {}, {}
    for name, call in twin.calls.items():
        for i, x in enumerate(call.outputs):
            if x is not None:
                key = f"{name} (output {i})" if i else name
                mine[key], wanted[key] = np.asarray(calls[name].outputs[i]), x
    return distance.compare(mine, wanted, kind=kind)


def _first(call: Call, other: TorchCall | None) -> int:
    """Return which of a JAX call's outputs corresponds to PyTorch's first."""
    if other is None:
        return 0
    wanted = other.call.outputs[0]
    return next((i for i, x in enumerate(call.outputs) if x is not None and _is_of(x, wanted)), 0)


def _is_of(x: np.ndarray, y: np.ndarray) -> bool:
    """True if two tensors hold the same values, in any order."""
    return x.size == y.size and bool(np.array_equal(np.sort(x, axis=None), np.sort(y, axis=None)))


def _with_twin(name: str, other: str | None) -> str:
    return f"{name} ({other} in PyTorch)" if other and other != name else name


def _listed(shown: list[str]) -> str:
    more = f" and {len(shown) - MAX_SHOWN} more" if shown[MAX_SHOWN:] else ""
    return ", ".join(shown[:MAX_SHOWN]) + more


def is_module(name: str, value: Any, model: JaxModel, twin: TorchSide) -> bool:
    """True for an entry of `names` that maps a module or tap, not a weight."""
    modules = dict(twin.module.named_modules())
    is_array = name in model.params or name in model.state
    return isinstance(value, str) and not is_array and (value in modules or value == ROOT)
