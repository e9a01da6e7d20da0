"""An array of a model and what its name tells: kind, role, and a path that can be equal on both sides (S file)."""

from __future__ import annotations

import collections
import os.path
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbench.pair.rules import Shape

# Synonyms in parameter names. A word that is not here must be equal or similar on both sides.
KINDS = {
    "weight": ("kernel", "w", "weight", "scale", "gamma", "g", "embedding", "embeddings"),
    "bias": ("bias", "b", "beta", "offset"),
    "mean": ("mean", "running_mean", "average_mean"),
    "var": ("var", "running_var", "variance"),
    "debiasing": ("mean_hidden", "mean_counter", "var_hidden", "var_counter"),  # of Haiku's averages; PyTorch has none
}
WORDS = {
    "q": ("query", "queries", "q_proj", "wq"), "k": ("key", "keys", "k_proj", "wk"),
    "v": ("value", "values", "v_proj", "wv"), "out": ("output", "o", "o_proj", "out_proj", "proj", "wo"),
    "attn": ("attention", "mha", "self_attn"), "layer": ("layers", "block", "blocks", "h", "stage"),
    "norm": ("ln", "layernorm", "layer_norm", "bn", "batchnorm", "batch_norm", "rmsnorm", "groupnorm"),
    "embed": ("embedding", "embeddings", "wte", "embedder"), "linear": ("dense", "fc"),
    "shortcut": ("downsample", "skip"), "gate": ("gate_proj",), "up": ("up_proj",), "down": ("down_proj",),
    "mlp": ("ffn", "feedforward", "feed_forward"), "conv": ("conv2d", "conv1d", "conv3d"),
}  # fmt: skip
GATED = {"1": "gate", "2": "down", "3": "up"}  # w1, w2, w3 of a gated layer in Llama's and Mixtral's own code
ROLES = ("norm", "conv", "linear", "embed", "attn")
_KIND = {word: kind for kind, words in KINDS.items() for word in words}
_WORD = {word: meaning for meaning, words in WORDS.items() for word in (*words, meaning)}


class Leaf(NamedTuple):
    """One array of a model: a JAX array or a PyTorch tensor."""

    name: str  # dotted path
    shape: Shape
    order: int  # by its module's first call, then by definition
    is_reversed: bool = False  # a kernel stored [.., in, out], as Flax and Haiku do
    value: np.ndarray | None = None  # set where the caller says that both models hold the same values
    owner: str = ""  # class of its module, where known
    source: str = ""  # module whose unchanged output its module reads, where known
    is_optional: bool = False  # may stay unmatched: a buffer that the other side computes
    is_bare: bool = False  # its class implies no layout, so it is taken to be stored as its counterpart is
    is_ordered: bool = True  # False where `order` comes from names alone, which is no evidence
    is_counted: bool = False  # the framework numbered it, in the order in which modules were created, not used

    @property
    def kind(self) -> str:
        """One of KINDS, from the name, or a vector's ending (ln_b); empty where the name does not tell."""
        last = re.split(r"[./]", self._path)[-1].lower()
        pieces = last.split("_")
        named = next((_KIND[word] for word in pieces if word in ("weight", "bias")), "")
        ending = _KIND.get(pieces[-1], "") if sum(size > 1 for size in self.shape) < 2 else ""  # lora_b is no bias
        return _KIND.get(last) or named or ending

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the path, synonyms unified, and its numbers; a last word that only tells the kind is dropped."""
        path = re.sub(r"([a-z])([A-Z])", r"\1_\2", self._path).lower()
        words = []
        for part in re.split(r"[./~]+", path):
            whole = re.sub(r"_?\d+$", "", part)
            pieces = [whole] if whole in _WORD else whole.split("_")
            words += [_WORD.get(piece, piece) for piece in pieces if piece]
            words += [str(int(number)) for number in re.findall(r"\d+$", part)]
        return tuple(words[:-1] if words and words[-1] in _KIND else words)

    @property
    def _path(self) -> str:
        """The name; the tensors of PyTorch's weight_norm as conv.g and conv.v."""
        older = re.sub(r"parametrizations\.(\w+)\.original([01])$", lambda m: f"{m[1]}_{'gv'[int(m[2])]}", self.name)
        return re.sub(r"\bweight_([gv])$", r"\1", older)

    @property
    def parent(self) -> str:
        """Path of its module."""
        return self.name.rpartition(".")[0]

    @property
    def role(self) -> str:
        """Role of its module: norm, conv, linear, embed or attn; empty where neither class nor name tells."""
        owner = self.owner or re.sub(r"_?\d+$", "", re.split(r"[./]", self.name)[-2:][0])
        name = re.sub(r"\d+d?$", "", re.sub(r"([a-z])([A-Z])", r"\1_\2", owner).lower())
        meaning = [_WORD.get(word) for word in (name.replace("_", ""), *name.split("_"))]
        return next((word for word in meaning if word in ROLES), "")


def natural(name: str) -> tuple:
    """Return a natural sort key, which compares numbers in names as numbers: layers_2 before layers_10."""
    return tuple((bool(i % 2), int(part) if i % 2 else part) for i, part in enumerate(re.split(r"(\d+)", name)))


def equal_paths(arrays: Sequence[Leaf], tensors: Sequence[Leaf]) -> set[tuple[str, str]]:
    """Return pairs of names, (array, tensor), with equal paths: equal words up to synonyms, equal kind and numbers.

    The common prefix of all names of one side may be ignored. Numbers are compared by rank where both sides have as
    many in the same places: conv_0 and conv_1 match conv1 and conv2, and conv_1 does not match conv1. Where one side
    has only some of the other's numbers, the lowest among them, numbers are compared by value. Names numbered by a
    framework, such as Linen's Dense_0 and Haiku's linear_1, give no pairs.
    """
    paths = _paths(arrays, tensors), _paths(tensors, arrays)
    families = lambda start: [_families(*each, start) for each in zip((arrays, tensors), paths, strict=True)]
    return set().union(*(_equal_paths(*families(start)) for start in (0, None)))


def _paths(leaves: Sequence[Leaf], others: Sequence[Leaf]) -> dict[str, tuple[str, ...]]:
    """Return each name's words and its kind; w1, w2 and w3 are gate, down and up where the other side has those."""
    places = {leaf.name: leaf.words for leaf in leaves}
    known = {word for leaf in others for word in leaf.words}
    numbers = collections.defaultdict(set)
    for words in places.values():
        if words[-2:-1] == ("w",):
            numbers[words[:-2]].add(words[-1])
    gated = {path for path, found in numbers.items() if found == GATED.keys() and known.issuperset(GATED.values())}
    return {
        leaf.name: (*words[:-2], GATED[words[-1]], leaf.kind or "weight")
        if words[-2:-1] == ("w",) and words[:-2] in gated else (*words, leaf.kind)
        for leaf in leaves for words in [places[leaf.name]]
    }  # fmt: skip


def _equal_paths(
    mine: dict[tuple, dict[str, tuple]], theirs: dict[tuple, dict[str, tuple]]
) -> set[tuple[str, str]]:  # fmt: skip
    pairs = set()
    for pattern in mine.keys() & theirs.keys():
        one, known = _ranked(mine[pattern]), _ranked(theirs[pattern])
        if one.keys() != known.keys():
            one, known = _by_numbers(mine[pattern]), _by_numbers(theirs[pattern])
            few = min(one.keys(), known.keys(), key=len)
            is_start = one.keys() & known.keys() == few and len(few) > 1 and min(one) == min(known)
            if not is_start:
                continue
        for numbers in one.keys() & known.keys():
            names, others = one[numbers], known[numbers]
            is_clear = len(names) == len(others) == 1
            pairs |= {(name, other) for name in names for other in others if is_clear or name == other}
    return pairs


def _families(
    leaves: Sequence[Leaf], paths: dict[str, tuple[str, ...]], start: int | None
) -> dict[tuple, dict[str, tuple]]:
    """Group names by path without numbers and without its first `start` words (None = the common prefix of all).

    The values are each name's numbers.
    """
    if start is None:
        start = len(os.path.commonprefix([path[:-1] for path in paths.values()])) if len(paths) > 1 else 0
    families: dict[tuple, dict[str, tuple]] = collections.defaultdict(dict)
    for leaf in leaves:
        name, path = leaf.name, paths[leaf.name]
        if leaf.is_counted and any(word.isdigit() for word in path[start:]):
            continue
        pattern = tuple("#" if word.isdigit() else word for word in path[start:])
        families[pattern][name] = tuple(int(word) for word in path[start:] if word.isdigit())
    return families


def _by_numbers(family: dict[str, tuple]) -> dict[tuple, list[str]]:
    found: dict[tuple, list[str]] = collections.defaultdict(list)
    for name, numbers in family.items():
        found[numbers].append(name)
    return found


def _ranked(family: dict[str, tuple]) -> dict[tuple, list[str]]:
    """Group names by the ranks of their numbers."""
    ranks = [{n: i for i, n in enumerate(sorted(set(column)))} for column in zip(*family.values(), strict=True)]
    ranked = {name: tuple(r[n] for r, n in zip(ranks, each, strict=True)) for name, each in family.items()}
    return _by_numbers(ranked)
