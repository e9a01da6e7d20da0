"""Which PyTorch tensors a JAX model's arrays are: by shape, name, order of use and values (S file).

A guess is an assignment of least cost (Hungarian method) between arrays, and parts of fused ones, whose shapes can be
arranged as each other; what is left over is an error, never silence.
"""

from __future__ import annotations

import collections
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.pair.rules import Arrangement, Given, Rule, Shape, arrangements
from jaxbench.parity import distance

# Words of one meaning in the names of parameters. What is not here must be equal or similar.
KINDS = {
    "weight": ("kernel", "w", "weight", "scale", "gamma", "g", "embedding", "embeddings"),
    "bias": ("bias", "b", "beta", "offset"),
    "mean": ("mean", "running_mean", "average_mean"),
    "var": ("var", "running_var", "variance"),
    "debiasing": ("mean_hidden", "mean_counter", "var_hidden", "var_counter"),  # of Haiku's averages; PyTorch has none
}
WORDS = {
    "q": ("query", "queries", "q_proj", "wq"), "k": ("key", "keys", "k_proj", "wk"),
    "v": ("value", "values", "v_proj", "wv"), "out": ("output", "o", "o_proj", "proj", "wo"),
    "attn": ("attention", "mha", "self_attn"), "layer": ("layers", "block", "blocks", "h", "stage"),
    "norm": ("ln", "layernorm", "layer_norm", "bn", "batchnorm", "batch_norm", "rmsnorm", "groupnorm"),
    "embed": ("embedding", "embeddings", "wte", "embedder"), "linear": ("dense", "fc"),
    "shortcut": ("downsample", "skip"),
    "mlp": ("ffn", "feedforward", "feed_forward"), "conv": ("conv2d", "conv1d", "conv3d"),
}  # fmt: skip
ROLES = ("norm", "conv", "linear", "embed", "attn")
_KIND = {word: kind for kind, words in KINDS.items() for word in words}
_WORD = {word: meaning for meaning, words in WORDS.items() for word in (*words, meaning)}
WEIGHT_KIND, WEIGHT_NAME, WEIGHT_ROLE, WEIGHT_ORDER, WEIGHT_VALUES, WEIGHT_MODULE = 3.0, 1.5, 1.0, 1.5, 4.0, 2.0
ROUNDS = 3  # of assignment, each knowing the one before
WEIGHT_SOURCE = 5.0  # above all that a round's mistakes of order can cost together
NEVER = 1e6
TURNED = "same values, in another order of axes than its own"
MAX_PARTS = 4  # of one fused tensor
MAX_SHOWN = 12  # leaves that an error names


class Leaf(NamedTuple):
    """One array of a model."""

    name: str  # dotted path
    shape: Shape
    order: int  # of its module's first call, then of definition
    is_reversed: bool = False  # a kernel stored [.., in, out], as Flax and Haiku do
    value: np.ndarray | None = None  # where both models are said to hold the same values
    owner: str = ""  # class of its module, where known
    source: str = ""  # module whose output its module reads as it is, where one is known
    is_optional: bool = False  # may be left over: a buffer that the other side computes
    is_bare: bool = False  # of a class that says nothing of its layout, so that it is stored as its counterpart is

    @property
    def kind(self) -> str:
        """Weight, bias, mean or var; empty where the name does not say."""
        last = re.split(r"[./]", self.name)[-1].lower()
        return _KIND.get(last) or next((_KIND[word] for word in last.split("_") if word in ("weight", "bias")), "")

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the path in their common meaning, and its numbers; without what only says the kind."""
        path = re.sub(r"([a-z])([A-Z])", r"\1_\2", self.name).lower()
        words = []
        for part in re.split(r"[./~]+", path):
            whole = re.sub(r"_?\d+$", "", part)
            pieces = [whole] if whole in _WORD else whole.split("_")
            words += [_WORD.get(piece, piece) for piece in pieces if piece]
            words += re.findall(r"\d+$", part)
        return tuple(words[:-1] if words and words[-1] in _KIND else words)

    @property
    def parent(self) -> str:
        """Path of its module."""
        return self.name.rpartition(".")[0]

    @property
    def role(self) -> str:
        """What its module is: norm, conv, linear, embed or attn; empty where neither class nor name says."""
        owner = self.owner or re.sub(r"_?\d+$", "", re.split(r"[./]", self.name)[-2:][0])
        name = re.sub(r"\d+d?$", "", re.sub(r"([a-z])([A-Z])", r"\1_\2", owner).lower())
        meaning = [_WORD.get(word) for word in (name.replace("_", ""), *name.split("_"))]
        return next((word for word in meaning if word in ROLES), "")


class _Slot(NamedTuple):
    """A leaf, or one of the equal parts that it falls into along an axis."""

    whole: Leaf
    part: Leaf  # with the shape of the part
    index: int = 0
    count: int = 1
    axis: int = 0


class Guess(NamedTuple):
    """One array, what it is made of, and why."""

    name: str
    rule: Rule | Given
    why: str  # "given", or what spoke for it
    rivals: int  # other tensors that would have fitted its shape


class Matching(NamedTuple):
    """A rule for every array of the JAX model."""

    guesses: tuple[Guess, ...]
    ignored: tuple[str, ...]  # PyTorch tensors without a place in the JAX model: as the caller said, or buffers
    kept: tuple[str, ...] = ()  # state of the JAX model that PyTorch does not have, and that keeps its own values

    @property
    def rules(self) -> dict[str, Rule | Given]:
        """Rules by the JAX array's name."""
        return {guess.name: guess.rule for guess in self.guesses}

    def to_jax(self, tensors: Mapping[str, object]) -> dict:
        """The JAX model's arrays out of PyTorch's tensors."""
        return {
            name: rule.apply(tensors) if isinstance(rule, Rule) else rule(tensors) for name, rule in self.rules.items()
        }


def match(
    arrays: Sequence[Leaf], tensors: Sequence[Leaf], names: Mapping[str, str | Rule | Given | None] | None = None
) -> Matching:
    """Rules for every array of a JAX model.

    Args:
      arrays: of the JAX model.
      tensors: parameters and buffers of the PyTorch module.
      names: what the caller knows better, by JAX name: a PyTorch name, a Rule, or a function of all tensors by name;
        and by PyTorch name: None for a tensor that the JAX model does not have.

    Raises:
      ValueError: an array or a tensor is left over, a given name does not exist or does not fit; the message lists
        every one, with the nearest that would fit.
    """
    by_name, wanted = {leaf.name: leaf for leaf in tensors}, {leaf.name: leaf for leaf in arrays}
    given, ignored = _given(names or {}, wanted, by_name)
    used = set(ignored) | {source for guess in given for source in _sources(guess.rule)}
    free_arrays = [leaf for leaf in arrays if leaf.name not in {guess.name for guess in given}]
    free_tensors = [leaf for leaf in tensors if leaf.name not in used]
    has_function = any(not isinstance(guess.rule, Rule) for guess in given)
    found = {guess.name: guess for guess in (*given, *_assigned(free_arrays, free_tensors))}
    left_arrays = [leaf for leaf in arrays if leaf.name not in found]
    taken = {source for guess in found.values() for source in _sources(guess.rule)}
    left_tensors = [leaf for leaf in free_tensors if leaf.name not in taken]
    needed = [leaf for leaf in left_tensors if not (leaf.is_optional or has_function)]
    wanted_arrays = [leaf for leaf in left_arrays if not leaf.is_optional]
    if wanted_arrays or needed:
        raise ValueError(_left_over(wanted_arrays, needed))
    ignored += tuple(leaf.name for leaf in left_tensors)  # a function by hand may read any of them
    kept = tuple(leaf.name for leaf in left_arrays)
    return Matching(tuple(found[leaf.name] for leaf in arrays if leaf.name in found), ignored, kept)


def _given(
    names: Mapping[str, str | Rule | Given | None], arrays: Mapping[str, Leaf], tensors: Mapping[str, Leaf]
) -> tuple[list[Guess], tuple[str, ...]]:
    """Guesses and ignored tensors that the caller states."""
    guesses, ignored = [], []
    for name, value in names.items():
        if value is None:
            if name not in tensors:
                raise ValueError(f"names={{{name!r}: None}}: no such PyTorch tensor{near(name, tensors)}")
            ignored.append(name)
            continue
        if name not in arrays:
            raise ValueError(f"names={{{name!r}: ...}}: no such JAX array{near(name, arrays)}")
        if isinstance(value, str):
            if value not in tensors:
                raise ValueError(f"names={{{name!r}: {value!r}}}: no such PyTorch tensor{near(value, tensors)}")
            fits = _arrangements(tensors[value], arrays[name])
            if not fits:
                shapes = f"{list(tensors[value].shape)} cannot be arranged as {list(arrays[name].shape)}"
                raise ValueError(f"names={{{name!r}: {value!r}}}: {shapes}")
            value = Rule((value,), fits[0])
        if not isinstance(value, Rule) and not callable(value):
            wanted = "a PyTorch name, a jaxbench.Rule, a function of all tensors, or None"
            raise ValueError(f"names={{{name!r}: {value!r}}}: wanted {wanted}")
        missing = [source for source in _sources(value) if source not in tensors]
        if missing:
            raise ValueError(f"names={{{name!r}: ...}}: no such PyTorch tensor: {', '.join(missing)}")
        guesses.append(Guess(name, value, "given", 0))
    return guesses, tuple(ignored)


def _assigned(arrays: Sequence[Leaf], tensors: Sequence[Leaf]) -> list[Guess]:
    """As many arrays as can be, with a tensor, a part of one or several for each, at the least cost in all."""
    from scipy.optimize import linear_sum_assignment

    if not arrays or not tensors:
        return []
    outputs = lambda leaf: len(leaf.shape) - 1 if leaf.is_reversed else 0  # the axis that a fused tensor is split along
    tensor_slots = [slot for leaf in tensors for slot in _slots(leaf, arrays, axes=(outputs(leaf),))]
    parts = [slot.part for slot in tensor_slots]
    array_slots = [slot for leaf in arrays for slot in _slots(leaf, parts, axes=(len(leaf.shape) - 1, 0))]
    costs = np.full((len(array_slots), len(tensor_slots)), NEVER)
    ranks = [_ranks(slots) for slots in (array_slots, tensor_slots)]
    for i, array in enumerate(array_slots):
        for j, tensor in enumerate(tensor_slots):
            if _fits(array.part, tensor.part) and 1 in (array.count, tensor.count):
                costs[i, j] = _cost(array.part, tensor.part, ranks[0][i], ranks[1][j])
    rows, columns = linear_sum_assignment(costs)
    for _ in range(ROUNDS - 1):
        rows, columns = linear_sum_assignment(costs + _apart(array_slots, tensor_slots, rows, columns, costs))
    pairs = [(array_slots[i], tensor_slots[j]) for i, j in zip(rows, columns, strict=True) if costs[i, j] < NEVER]
    rivals = {array_slots[i].whole.name: int(np.sum(costs[i] < NEVER)) - 1 for i in rows}
    return _guesses(_ordered(pairs), rivals)


def _apart(
    arrays: Sequence[_Slot], tensors: Sequence[_Slot], rows: np.ndarray, columns: np.ndarray, costs: np.ndarray
) -> np.ndarray:
    """Cost of taking weights of one module from several, or those of its source from elsewhere, by the last round."""
    went = collections.defaultdict(list)  # by JAX module: where each of its arrays went, weighted by how sure that is
    for i, j in zip(rows, columns, strict=True):
        if costs[i, j] < NEVER:
            sure = 1.0 / int(np.sum(costs[i] < NEVER))
            went[arrays[i].whole.parent].append((arrays[i].whole.name, tensors[j].whole.parent, sure))
    cost = np.zeros_like(costs)
    for i, array in enumerate(arrays):
        siblings = [(module, sure) for name, module, sure in went[array.whole.parent] if name != array.whole.name]
        sources = [(module, sure) for _, module, sure in went.get(array.whole.source, ())]
        for j, tensor in enumerate(tensors):
            cost[i, j] = WEIGHT_MODULE * _elsewhere(siblings, tensor.whole.parent)
            if tensor.whole.source:
                cost[i, j] += WEIGHT_SOURCE * _elsewhere(sources, tensor.whole.source)
    return cost


def _elsewhere(places: Sequence[tuple[str, float]], place: str) -> float:
    """Share, weighted by how sure each is, of places that are another one."""
    total = sum(sure for _, sure in places)
    return sum(sure for each, sure in places if each != place) / total if total else 0.0


def _slots(leaf: Leaf, others: Sequence[Leaf], *, axes: tuple[int, ...]) -> list[_Slot]:
    """The leaf itself where it can be one of the others, else the fewest equal parts that some of them can be."""
    if not leaf.shape or any(_fits(leaf, other) for other in others):
        return [_Slot(leaf, leaf)]
    # First counts that divide the number of arrays they fit, which a stack of equal layers keeps.
    for is_even, count, axis in itertools.product((True, False), range(2, MAX_PARTS + 1), axes):
        if leaf.shape[axis] % count == 0:
            part = leaf._replace(shape=(*leaf.shape[:axis], leaf.shape[axis] // count, *leaf.shape[axis + 1 :]))
            fitting = sum(_fits(part, other) for other in others)
            if fitting >= count and not (is_even and fitting % count):
                return [_Slot(leaf, part, index, count, axis) for index in range(count)]
    return [_Slot(leaf, leaf)]


def _ordered(pairs: Iterable[tuple[_Slot, _Slot]]) -> list[tuple[_Slot, _Slot]]:
    """Pairs in which the parts of one whole follow query, key, value, else the order of use of the other side."""
    groups: dict[tuple[str, str], list[tuple[_Slot, _Slot]]] = collections.defaultdict(list)
    for array, tensor in pairs:
        is_joined = array.count > 1
        groups["array" if is_joined else "tensor", (array if is_joined else tensor).whole.name].append((array, tensor))
    ordered = []
    for (side, _), group in groups.items():
        split, other = (0, 1) if side == "array" else (1, 0)
        slots = sorted((pair[split] for pair in group), key=lambda slot: slot.index)
        others = sorted((pair[other] for pair in group), key=lambda slot: _place(slot.whole))
        ordered += [(s, o) if side == "array" else (o, s) for s, o in zip(slots, others, strict=True)]
    return ordered


def _place(leaf: Leaf) -> tuple[int, int]:
    places = {"q": 0, "k": 1, "v": 2}
    return min((places[word] for word in leaf.words if word in places), default=3), leaf.order


def _guesses(pairs: Iterable[tuple[_Slot, _Slot]], rivals: Mapping[str, int]) -> list[Guess]:
    """Guesses of arrays whose every part has a tensor; and of tensors whose every part is taken."""
    pairs = list(pairs)
    of_array = collections.Counter(array.whole.name for array, _ in pairs)
    of_tensor = collections.Counter(tensor.whole.name for _, tensor in pairs)
    guesses: dict[str, Guess] = {}
    for array, tensor in pairs:
        name = array.whole.name
        if of_array[name] < array.count or of_tensor[tensor.whole.name] < tensor.count:
            continue
        arrangement = _arrangement(array, tensor)
        if array.count > 1:
            sources = (*guesses[name].rule.sources, tensor.whole.name) if name in guesses else (tensor.whole.name,)
            rule = Rule(sources, arrangement, joined=array.axis)
        else:
            part = (tensor.index, tensor.count) if tensor.count > 1 else None
            rule = Rule((tensor.whole.name,), arrangement, part, axis=tensor.axis)
        is_turned = arrangement != _arrangements(tensor.part, array.part)[0]
        why = TURNED if is_turned else _why(array.whole, tensor.whole, rivals[name])
        guesses[name] = Guess(name, rule, why, rivals[name])
    return list(guesses.values())


def _fits(leaf: Leaf, other: Leaf) -> bool:
    """True where one leaf's shape can be arranged as the other's and their names do not say two kinds."""
    if math.prod(leaf.shape) != math.prod(other.shape) or (leaf.kind and other.kind and leaf.kind != other.kind):
        return False
    return bool(arrangements(other.shape, leaf.shape, is_reversed=False) or _arrangements(other, leaf))


def _arrangements(tensor: Leaf, array: Leaf) -> list[Arrangement]:
    is_transposed = tensor.owner.startswith("ConvTranspose") and array.name.endswith("kernel")
    is_reversed = array.is_reversed != tensor.is_reversed and not tensor.is_bare
    return arrangements(tensor.shape, array.shape, is_reversed=is_reversed, is_transposed=is_transposed)


def _has_values(*slots: _Slot) -> bool:
    return all(slot.whole.value is not None for slot in slots)


def _arrangement(array: _Slot, tensor: _Slot) -> Arrangement:
    """How a tensor, or its part, is arranged; where a bare one's values are known, they decide."""
    fits = _arrangements(tensor.part, array.part)
    if tensor.part.is_bare and array.count == tensor.count == 1 and _has_values(array, tensor):
        same = lambda fit: np.allclose(fit.apply(tensor.part.value), array.part.value, rtol=1e-5, atol=1e-7)
        return next(filter(same, fits), fits[0])
    return fits[0]


def _ranks(slots: Sequence[_Slot]) -> list[int]:
    """Place of each slot, in order of use, among those of its kind and size."""
    groups: dict[tuple, list[int]] = collections.defaultdict(list)
    for i in sorted(range(len(slots)), key=lambda i: (slots[i].whole.order, slots[i].index)):
        groups[slots[i].whole.kind, math.prod(slots[i].part.shape)].append(i)
    ranks = {i: rank for group in groups.values() for rank, i in enumerate(group)}
    return [ranks[i] for i in range(len(slots))]


def _cost(array: Leaf, tensor: Leaf, rank: int, other_rank: int) -> float:
    """Cost of taking a tensor for an array: 0 where all that is known speaks for it."""
    cost = WEIGHT_KIND * (array.kind != tensor.kind)
    cost += WEIGHT_NAME * (1.0 - _similarity(array.words, tensor.words))
    cost += WEIGHT_ROLE * bool(array.role and tensor.role and array.role != tensor.role)
    cost += WEIGHT_ORDER * min(abs(rank - other_rank), 3) / 3
    if array.value is not None and tensor.value is not None:
        cost += WEIGHT_VALUES * (not _same_values(array.value, tensor.value))
    return cost


def _similarity(words: tuple[str, ...], others: tuple[str, ...]) -> float:
    """Share of the words of two paths that stand in both, in the same order; 1 for two empty paths."""
    if not words and not others:
        return 1.0
    return difflib.SequenceMatcher(None, words, others, autojunk=False).ratio()


def _same_values(value: np.ndarray, other: np.ndarray) -> bool:
    """True where two arrays hold the same numbers in any order, within the rounding of float32, and they differ."""
    a, b = distance.widest(np.sort(value, axis=None)), distance.widest(np.sort(other, axis=None))
    return bool(a.size and a[0] != a[-1] and np.allclose(a, b, rtol=1e-5, atol=1e-7))


def _why(array: Leaf, tensor: Leaf, rivals: int) -> str:
    if array.value is not None and tensor.value is not None and _same_values(array.value, tensor.value):
        return "same values"
    if not rivals:
        return "only one of its shape"
    return "name" if _similarity(array.words, tensor.words) >= 0.6 else "order of use"


def _sources(rule: Rule | Given) -> tuple[str, ...]:
    return rule.sources if isinstance(rule, Rule) else ()


def near(name: str, known: Iterable[str]) -> str:
    """Words on names that are nearly the same; empty where there are none."""
    names = difflib.get_close_matches(name, list(known), n=3, cutoff=0.3)
    return f"; nearest: {', '.join(names)}" if names else ""


def _left_over(arrays: Sequence[Leaf], tensors: Sequence[Leaf]) -> str:
    """Message that lists what has no counterpart, and how to say it by hand."""
    lines = ["weights do not match"]
    for title, leaves in (("JAX arrays", arrays), ("PyTorch tensors", tensors)):
        if leaves:
            shown = ", ".join(f"{leaf.name} {list(leaf.shape)}" for leaf in leaves[:MAX_SHOWN])
            more = f" and {len(leaves) - MAX_SHOWN} more" if len(leaves) > MAX_SHOWN else ""
            lines.append(f"{title} left over: {shown}{more}")
    lines.append(
        "say what they are with names={'jax.name': 'torch.name' or a function of the tensors, 'torch.name': None}"
    )
    return "; ".join(lines)
