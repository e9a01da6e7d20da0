"""Responses of a folder with their features and labels, as arrays (S file)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxbench.hallucination import lexical, pooled, sentences
from jaxbench.hallucination.detector import Inputs, Labels
from jaxbench.hallucination.extract import Item, Store
from jaxbench.hallucination.ragtruth import Data, Response

Array = np.ndarray


class Table(NamedTuple):
    """What is evaluated; nothing of `task`, `generator` and `split` is a feature unless a row says so."""

    inputs: Inputs
    labels: Labels
    task: Array  # [responses]
    generator: Array  # [responses]
    split: Array  # [responses]
    spans: list[list[tuple[int, int]]]  # characters of each response's sentences

    @property
    def cell(self) -> Array:
        """Task and generator of each response."""
        return np.char.add(np.char.add(self.task, " "), self.generator)


def make(data: Data, store: Store | None, *, progress: Callable[[], Any] = lambda: None) -> Table:
    """Table of a folder; without a store, of lexical evidence alone.

    Raises:
      ValueError: a response's features are missing.
    """
    contexts = {name: lexical.Lexicon(source.context) for name, source in data.sources.items()}
    whole: dict[str, list] = {}
    parts: dict[str, list] = {}
    spans, part_labels, counts = [], [], []
    for response in data.responses:
        by_response, by_sentence = _pooled(data, response, contexts[response.source_id], store)
        for found, kept in ((by_response, whole), (by_sentence, parts)):
            for name, values in found.families.items():
                kept.setdefault(name, []).append(values)
        number = len(by_sentence.spans)
        parts.setdefault("place", []).append(np.stack([np.arange(number) / number, np.full(number, number)], axis=1))
        spans.append(by_sentence.spans)
        part_labels += [is_labelled(response, start, end) for start, end in by_sentence.spans]
        counts.append(number)
        progress()
    joined = [{name: np.concatenate(values) for name, values in kept.items()} for kept in (whole, parts)]
    rows = data.responses
    labels = Labels(
        np.array([bool(row.labels) for row in rows]), np.array(part_labels), np.array([row.source_id for row in rows])
    )
    tasks = np.array([data.source(row).task for row in rows])
    inputs = Inputs(*joined, np.repeat(np.arange(len(rows)), counts))
    return Table(inputs, labels, tasks, np.array([r.model for r in rows]), np.array([r.split for r in rows]), spans)


def is_labelled(response: Response, start: int, end: int) -> bool:
    """True where a label lies on some of the characters."""
    return any(label.start < end and start < label.end for label in response.labels)


def _pooled(
    data: Data, response: Response, lexicon: lexical.Lexicon, store: Store | None
) -> tuple[pooled.Pooled, pooled.Pooled]:
    """Features of a response, and of its sentences."""
    source = data.source(response)
    if store is None:
        tokens = lexical.tokens(response.response)
        parts = sentences.sentences(response.response)
        return tuple(
            pooled.Pooled({"lexical": pooled.lexical_counts(tokens, lexicon, spans)}, spans)
            for spans in ([(0, len(response.response))], parts)
        )
    key = store.key(Item(source.context, source.asked, response.response))
    if not store.has(key):
        raise ValueError(
            f"features of response {response.id} are not in {store.folder}; run `hallucination.py features` with the "
            "same --config, --set and --workdir"
        )
    features = store.read(key)
    return tuple(pooled.pool(features, response.response, lexicon, by_sentence=by) for by in (False, True))
