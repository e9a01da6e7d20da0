"""The pseudo-random function of vLLM's Gumbel watermark, philox4x32-10-v1, in numpy (S file).

A context of h tokens (-1 where the text has not started) is folded, four at a time, into a state of four words that
starts as (0x574D4358, h, 0, 0); a token's word comes from the block of four it lies in. The uniform of a word w is
((w >> 8) + 1) / (2**24 + 1). Source: vLLM 0.33, vllm/v1/watermarking/prfs/philox.py.
"""

from __future__ import annotations

import numpy as np

from jaxbench import philox

CONTEXT_DOMAIN, TOKEN_DOMAIN = 0x574D4358, 0x574D544B


def state(contexts: np.ndarray, key: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """State [.. 4] (uint32) of contexts [.. h], oldest token first, under a key's halves (broadcast)."""
    contexts = np.asarray(contexts).astype(np.uint32)
    width = contexts.shape[-1]
    words = tuple(np.full(contexts.shape[:-1], word, np.uint32) for word in (CONTEXT_DOMAIN, width, 0, 0))
    for offset in range(0, width, 4):
        block = [
            contexts[..., offset + i] if offset + i < width else np.uint32(philox.MASK32 - i) for i in range(4)
        ]  # fmt: skip
        low, high = key
        counter = tuple(word ^ token for word, token in zip(words, block))
        words = philox.philox4x32(counter, (low ^ np.uint32(offset), high))
    return np.stack(np.broadcast_arrays(*words), axis=-1)


def token_words(states: np.ndarray, tokens: np.ndarray, key: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Word (uint32) of each token [..] at its context's state [.. 4]."""
    tokens, (low, high) = np.asarray(tokens).astype(np.uint32), key
    counter = (tokens >> 2, states[..., 0], states[..., 1], states[..., 2])
    words = philox.philox4x32(counter, (low ^ states[..., 3], high ^ np.uint32(TOKEN_DOMAIN)))
    return np.take_along_axis(np.stack(words, axis=-1), (tokens & 3).astype(np.int64)[..., None], axis=-1)[..., 0]


def uniform(words: np.ndarray) -> np.ndarray:
    """Float64 uniforms in (0, 1) that words stand for."""
    return ((words >> np.uint32(8)).astype(np.float64) + 1.0) / (2.0**24 + 1.0)
