"""A folder's responses with their features and labels, as arrays (S file)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxbench.hallucination import lexical, pooled, sentences, token_inputs
from jaxbench.hallucination.detector import Inputs, Labels
from jaxbench.hallucination.extract import Item, Store
from jaxbench.hallucination.ragtruth import Data, Response
from jaxbench.hallucination.response_features import ResponseFeatures

Array = np.ndarray


class Table(NamedTuple):
    """What is evaluated; `task`, `generator` and `split` are not features unless a row says so."""

    inputs: Inputs
    labels: Labels
    task: Array  # [responses]
    generator: Array  # [responses]
    split: Array  # [responses]
    spans: list[list[tuple[int, int]]]  # characters of each response's sentences
    marks: list[list[tuple[int, int]]]  # characters that are labelled
    texts: list[str]  # the responses

    @property
    def cell(self) -> Array:
        """Task and generator of each response."""
        return np.char.add(np.char.add(self.task, " "), self.generator)


def make(data: Data, store: Store | None, *, progress: Callable[[], Any] = lambda: None) -> Table:
    """Make the table of a folder; without a store, of lexical evidence alone.

    Sources with the same context, such as questions about one document, are one source in the labels: no split divides
    them.

    Raises:
      ValueError: a response's features are missing.
    """
    contexts = {name: lexical.Lexicon(source.context) for name, source in data.sources.items()}
    first: dict[str, str] = {}  # context -> the first source that has it
    same = {name: first.setdefault(source.context, name) for name, source in data.sources.items()}
    read, part_labels, tokens = [], [], []
    for response in data.responses:
        features = None if store is None else _features(data, response, store)
        lexicon = contexts[response.source_id]
        read.append(_pooled(features, response, lexicon))
        tokens += [] if features is None else [token_inputs.tokens(features, response.response, lexicon)]
        part_labels += [is_labelled(response, start, end) for start, end in read[-1][1].spans]
        progress()
    rows, marks = data.responses, [[(label.start, label.end) for label in row.labels or ()] for row in data.responses]
    labels = Labels(
        np.array([bool(row.labels) for row in rows]), np.array(part_labels),
        np.array([same[row.source_id] for row in rows]), tuple(each.labels(mine) for each, mine in zip(tokens, marks)),
    )  # fmt: skip
    tasks = np.array([data.source(row).task for row in rows])
    generators, splits = (np.array([getattr(row, name) for row in rows]) for name in ("model", "split"))
    spans = [parts.spans for _, parts in read]
    return Table(
        Inputs.join(read, tokens), labels, tasks, generators, splits, spans, marks, [row.response for row in rows]
    )


def is_labelled(response: Response, start: int, end: int) -> bool:
    """True if a label overlaps these characters."""
    return any(label.start < end and start < label.end for label in response.labels or ())


def _pooled(
    features: ResponseFeatures | None, response: Response, lexicon: lexical.Lexicon
) -> tuple[pooled.Pooled, pooled.Pooled]:
    """Pool the features of a response, and of its sentences."""
    if features is None:
        tokens = lexical.tokens(response.response)
        parts = sentences.sentences(response.response)
        return tuple(
            pooled.Pooled({"lexical": pooled.lexical_counts(tokens, lexicon, spans)}, spans)
            for spans in ([(0, len(response.response))], parts)
        )
    return tuple(pooled.pool(features, response.response, lexicon, by_sentence=by) for by in (False, True))


def _features(data: Data, response: Response, store: Store) -> ResponseFeatures:
    source = data.source(response)
    key = store.key(Item(source.context, source.asked, response.response))
    if not store.has(key):
        raise ValueError(
            f"features of response {response.id} are not in {store.folder}; run `hallucination.py features` with the "
            "same --config, --set and --workdir"
        )
    return store.read(key)
