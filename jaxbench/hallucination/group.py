"""Read the features of the responses to one prompt with a backend's FeatureReader (S file)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxbench.hallucination import encoding, layout
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.response_features import ResponseFeatures


class Group(NamedTuple):
    """Responses to one prompt, and their cache keys."""

    context: str
    question: str
    responses: tuple[str, ...]
    keys: tuple[str, ...]


class LoadedReader(NamedTuple):
    """A reader in memory: what read_group takes after the group, in its order."""

    feature_reader: Any  # a backend's FeatureReader
    tokenizer: Any
    window: int  # tokens


def read_group(
    group: Group, reader: Any, tokenizer: Any, window: int, settings: ReaderSettings
) -> Iterator[tuple[str, ResponseFeatures]]:
    """Yield the features of each response of a group, by key.

    Raises:
      ValueError: a response is empty or longer than half the window, or as encoding.encode_prompt.
    """
    responses = [encoding.encode_response(tokenizer, response) for response in group.responses]
    longest = max(len(response.ids) for response in responses)
    if longest > window // 2:
        raise ValueError(f"response: {longest} tokens, and the window of {window} takes {window // 2}; cut it in parts")
    prompt = encoding.encode_prompt(
        tokenizer, group.context, group.question, window=window - longest, style=settings.style
    )
    if prompt.num_cut and len(responses) > 1:  # else the longest decides how much context the others get
        for key, response in zip(group.keys, group.responses):
            alone = group._replace(responses=(response,), keys=(key,))
            yield from read_group(alone, reader, tokenizer, window, settings)
        return
    ids = [response.ids for response in responses]
    rows = layout.pack([len(each) for each in ids], settings.row_tokens)
    given = [layout.prompt_arrays([text], share=settings.share) for text in (prompt.text, prompt.without)]
    read, read_without = (reader.read_prompt(arrays) for arrays in given)
    for row in rows:
        packed = [ids[i] for i in row]
        arrays = layout.response_arrays([prompt.text], [packed])
        places = layout.places(packed)
        slots = [place.start + lens_slots(len(each), settings.lens_tokens) for place, each in zip(places, packed)]
        padded = np.zeros(arrays.tokens.size, np.int32)
        padded[: sum(map(len, slots))] = np.concatenate(slots)
        found = reader.scores(read, given[0], arrays, padded, sum(map(len, slots)))
        bare = layout.response_arrays([prompt.without], [packed], size=arrays.tokens.shape[1])
        without = reader.surprise(read_without, bare)
        used = 0
        for i, place, mine in zip(row, places, slots):
            features = ResponseFeatures(
                **_of_response(found, without, place),
                parametric_slots=(mine - place.start).astype(np.int32),
                parametric=found["parametric"][used : used + len(mine)].astype(np.float32),
                offsets=np.array(responses[i].offsets, np.int32),
                num_cut=np.array(prompt.num_cut, np.int32),
            )
            used += len(mine)
            yield group.keys[i], features


def _of_response(found: dict[str, np.ndarray], without: dict[str, np.ndarray], place: slice) -> dict[str, np.ndarray]:
    """Select one response of a single row: the features that every token has."""
    heads = {name: found[name][:, :, 0, place].astype(np.float16) for name in ("external", "context_mass", "lookback")}
    plain = {name: found[name][0, place].astype(np.float32) for name in ("loss", "entropy")}
    plain |= {f"{name}_without": value[0, place].astype(np.float32) for name, value in without.items()}
    return heads | plain | {"states": found["states"][0, place].astype(np.float16)}


def lens_slots(length: int, wanted: int | None) -> np.ndarray:
    """Tokens of a response whose parametric scores are computed: `wanted` evenly spread ones; None = all."""
    if wanted is None or wanted >= length:
        return np.arange(length)
    return ((np.arange(wanted) + 0.5) * length / wanted).astype(np.int64)
