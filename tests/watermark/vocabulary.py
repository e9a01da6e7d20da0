"""Words of a whole vocabulary, for tests: each candidate as the last token of a text of its own."""

import numpy as np

from jaxbench.watermark import reference
from jaxbench.watermark.keys import Key


def words(scheme, key, contexts, *, vocab_size, payload=0, green_lists=None):
    """Return the words [B V] of all tokens after contexts [B n] under one key or one for each row."""
    contexts = np.asarray(contexts)
    rows, width = contexts.shape
    candidates = np.tile(np.arange(vocab_size), rows)[:, None]
    texts = np.concatenate([np.repeat(contexts, vocab_size, axis=0), candidates], axis=1)
    keys = key if isinstance(key, Key) else [one for one in key for _ in range(vocab_size)]
    text = reference.Text(texts, np.zeros(len(texts), int), vocab_size, payload, green_lists)
    return scheme.text_words(keys, text)[0][:, width].reshape(rows, vocab_size)
