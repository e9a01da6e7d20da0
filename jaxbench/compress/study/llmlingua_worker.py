"""LLMLingua 0.2.2 as a worker: leave out the tokens of texts that a small decoder finds easiest to guess.

Started as `PYTHON -m jaxbench.compress.study.llmlingua_worker NAME THREADS` by the interpreter of a separate
environment (`make peers`): imports only those parts of jaxbench that need no package. Two things in LLMLingua do not
work here and are fixed: its token count requests a file from a server, and its key-value caches are tuples, which
transformers no longer takes.

Source: Jiang et al. 2023, arXiv:2310.05736.
"""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from jaxbench.measure import worker

ITERATIVE_SIZE = 50  # tokens scored together; with the default of 200, shorter texts are not compressed


class Words:
    """A tokenizer that only counts, for LLMLingua's report."""

    def encode(self, text: str) -> list[str]:
        """Words of a text."""
        return text.split()


class Session:
    """LLMLingua over one decoder."""

    def __init__(self, peer: str, threads: int):
        self.peer, self.threads = peer, threads

    def start(self, *, model: str) -> dict:
        """Load a decoder from a Hugging Face folder."""
        import tiktoken
        import torch

        torch.set_num_threads(self.threads)
        tiktoken.encoding_for_model = lambda name: Words()
        import llmlingua

        self._compressor = llmlingua.PromptCompressor(model, device_map="cpu")
        self._compressor.model.forward = _with_tuples(self._compressor.model.forward)
        return {"versions": {name: importlib.metadata.version(name) for name in ("llmlingua", "transformers", "torch")}}

    def compress(self, *, texts: list[str], ratio: int) -> dict:
        """Compress texts by about `ratio`; also return the seconds that all of them took."""
        started, found = time.perf_counter(), []
        for text in texts:
            made = self._compressor.compress_prompt(
                [text], rate=1 / ratio, iterative_size=ITERATIVE_SIZE, use_context_level_filter=False
            )
            found.append(made["compressed_prompt"])
        return {"texts": found, "seconds": time.perf_counter() - started}


def _with_tuples(forward: Any) -> Any:
    """Wrap a decoder's forward to take and return keys and values as tuples."""
    from transformers import DynamicCache

    def wrapped(*args: Any, past_key_values: Any = None, **how: Any) -> Any:
        cache = None if past_key_values is None else DynamicCache.from_legacy_cache(past_key_values)
        output = forward(*args, past_key_values=cache, **how)
        output.past_key_values = output.past_key_values.to_legacy_cache()
        return output

    return wrapped


if __name__ == "__main__":
    worker.serve(Session)
