"""What a batch of keys becomes before generation: arrays with one row a key (S file).

logits_processor.py takes them to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxbench import philox
from jaxbench.watermark import config, reference
from jaxbench.watermark.keys import Key

UNMARKED = Key(0)  # stands in the arrays of rows without a key, where nothing reads it


def check_generation(scheme: Any, vocab_size: int, green_lists: Any) -> None:
    """Check that a scheme can mark text with these green lists.

    Raises:
      ValueError: the scheme is for detection only, or its green lists are missing or of another vocabulary.
    """
    name = scheme.scheme
    if vocab_size < 2:
        raise ValueError(f"watermark {name}: vocab_size={vocab_size}, wanted at least 2")
    if scheme.key_field is None:
        return
    if green_lists is None:
        raise ValueError(f"watermark {name}: wanted the tables of its green lists (GreenLists), got {green_lists}")
    rule = green_lists.rule
    if rule.per_candidate:
        raise ValueError(f"watermark {name}: {scheme} has a list for each candidate token, which is for detection only")
    if green_lists.vocab_size != vocab_size:
        raise ValueError(f"watermark {name}: tables of {green_lists.vocab_size} tokens for a model of {vocab_size}")
    if rule.combine == "time" and green_lists.width > 1 and vocab_size > 2**16:
        raise ValueError(
            f"watermark {name}: f_scheme=time multiplies in 32 bits, vocab_size={vocab_size} is above 65536"
        )


def generation_state(
    scheme: Any,
    keys: Sequence[Key | None],
    *,
    vocab_size: int,
    payloads: Sequence[int] | None,
    seed: int,
    row_ids: Sequence[int] | None = None,
) -> dict[str, np.ndarray]:
    """Arrays of a batch; a key of None is a row that is not marked.

    Returns:
      marked bool [B]; keys uint32 [B 4], both halves of the first and of the second key; and where the scheme has them:
      payload int32 [B]; route uint32 [B 3], the seed's halves and the row's
      number; green bool [B V].

    Raises:
      ValueError: there is no row, or a payload does not fit the scheme.
    """
    if not keys:
        raise ValueError(f"watermark {scheme.scheme}: wanted at least one row, got keys={list(keys)}")
    own = [UNMARKED if key is None else key for key in keys]
    pairs = [reference.generation_keys(scheme, key) for key in own]
    state = {
        "marked": np.array([key is not None for key in keys]),
        "keys": np.array([first.halves + second.halves for first, second in pairs], np.uint32),
    }
    limit = config.num_payloads(scheme)
    messages = [0] * len(keys) if payloads is None else [*payloads, *[0] * (len(keys) - len(payloads))]
    if len(messages) != len(keys) or not all(0 <= message < limit for message in messages):
        raise ValueError(
            f"watermark {scheme.scheme}: payloads={list(payloads or [])} for {len(keys)} rows, wanted one a row in "
            f"[0, {limit}) (payload_bits={limit.bit_length() - 1})"
        )
    if limit > vocab_size:
        raise ValueError(f"watermark {scheme.scheme}: {limit} payloads are more than the {vocab_size} tokens")
    if limit > 1:
        state["payload"] = np.array(messages, np.int32)
    if reference.is_dual_key(scheme):
        numbers = range(len(keys)) if row_ids is None else [*row_ids, *[0] * (len(keys) - len(row_ids))]
        rows = [(*philox.split_seed(seed), row) for row in numbers]
        state["route"] = np.array(rows, np.uint32)
    if scheme.has_fixed_list:
        lists = {key: scheme.green_list(key, vocab_size) for key in set(own)}
        state["green"] = np.stack([lists[key] for key in own])
    return state
