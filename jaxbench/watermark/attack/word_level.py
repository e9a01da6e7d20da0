"""Edits of words and tokens at random places: delete, insert, substitute, swap, synonyms (S file)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxbench.watermark.attack import synonyms
from jaxbench.watermark.attack.random_draws import Draws, replace_matches

WORD = re.compile(r"(\s*)(\S+)")


def edit(name: str, items: Sequence[Any], strength: float, draws: Draws, *, pool: Sequence[Any]) -> list[Any]:
    """Edit items (words or token ids), each with probability `strength`; insertions and substitutes come from `pool`.

    delete: drop the item; insert: add one from the pool after it; substitute: replace it by another one from the pool;
    swap: exchange neighbours, per pair (0, 1), (2, 3), ...
    """
    if name == "swap":
        return swap(items, strength, draws)
    chosen = draws.uniform(len(items)) < strength
    if name == "delete":
        return [item for item, is_gone in zip(items, chosen) if not is_gone]
    picks = draws.integers(len(items), len(pool))
    out: list[Any] = []
    for item, is_chosen, pick in zip(items, chosen, picks):
        if not is_chosen:
            out.append(item)
        elif name == "insert":
            out += [item, pool[int(pick)]]
        else:
            new = pool[int(pick)]
            out.append(pool[(int(pick) + 1) % len(pool)] if new == item else new)
    return out


def swap(items: Sequence[Any], strength: float, draws: Draws) -> list[Any]:
    """Swap each pair (0, 1), (2, 3), ... of items with probability `strength`."""
    out = list(items)
    for i in np.flatnonzero(draws.uniform(len(out) // 2) < strength):
        out[2 * i], out[2 * i + 1] = out[2 * i + 1], out[2 * i]
    return out


def edit_text(name: str, text: str, strength: float, draws: Draws, *, human: Sequence[str] = ()) -> str:
    """Edit the words of a text, keeping its white space; new words come from human texts, else from the text itself."""
    pairs = WORD.findall(text)
    spaces, words = [space for space, _ in pairs], [word for _, word in pairs]
    tail = text[len(text.rstrip()) :]
    pool = [word for other in human for word in other.split()] if name in ("insert", "substitute") else []
    pool = pool or words
    if name in ("substitute", "swap"):
        changed = edit(name, words, strength, draws, pool=pool)
        return "".join(space + word for space, word in zip(spaces, changed)) + tail
    units = [space + word for space, word in pairs]
    return "".join(edit(name, units, strength, draws, pool=[" " + word for word in pool])) + tail


def synonyms_for(text: str, strength: float, draws: Draws) -> str:
    """Replace each word that has a synonym, with probability `strength`, by one of its synonyms."""
    thesaurus = synonyms.load()

    def synonym(word: str, pick: float) -> str:
        found = thesaurus.synonyms(word)
        return found[int(pick * len(found))] if found else word

    return replace_matches(r"[A-Za-z]+", text, strength, draws, synonym)
