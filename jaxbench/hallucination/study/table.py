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
    read, part_labels = [], []
    for response in data.responses:
        read.append(_pooled(data, response, contexts[response.source_id], store))
        part_labels += [is_labelled(response, start, end) for start, end in read[-1][1].spans]
        progress()
    rows = data.responses
    labels = Labels(
        np.array([bool(row.labels) for row in rows]), np.array(part_labels), np.array([row.source_id for row in rows])
    )
    tasks = np.array([data.source(row).task for row in rows])
    generators, splits = (np.array([getattr(row, name) for row in rows]) for name in ("model", "split"))
    return Table(Inputs.join(read), labels, tasks, generators, splits, [parts.spans for _, parts in read])


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
