"""Continue prompts a few tokens at a time, so that text can be streamed and interrupts are handled (S file)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.generation import requests
from jaxbench.generation.decoder import Decoder
from jaxbench.generation.pieces import Text
from jaxbench.prompts import SamplingParams

STREAMED, BATCHED = 4, 32  # tokens between two reads of the rows: what a reader sees as flow; what costs nothing


class Settings(NamedTuple):
    """How rows are continued."""

    new_tokens: int = 128  # at most
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    stop: tuple[str, ...] = ()  # a text ends before the first of these


class Timing(NamedTuple):
    """Tokens and times of one call, without compilation."""

    prompt_tokens: int
    tokens: int  # of the texts, up to a stop string
    prompt_s: float  # to the first tokens
    decode_s: float  # for all others
    decoded: int  # tokens that decode_s computed: a stop string is found a few tokens late

    def line(self, decoder: Decoder) -> str:
        """One-line summary, with the kernels and number types that computed it."""
        choice = decoder.choice
        rate = f", {self.decoded / self.decode_s:.1f} tokens/s" if self.decoded and self.decode_s > 0 else ""
        kernels = f"{choice.kernels} kernels, weights {decoder.weights}"
        if choice.kernels == "native":
            kernels += f", cache {choice.cache}, activations {choice.activations}"
        kernels += f", {decoder.num_devices} devices" if decoder.num_devices > 1 else ""
        prompt = f"{self.prompt_tokens} prompt tokens in {1e3 * self.prompt_s:.0f} ms"
        return f"{prompt}, {self.tokens} new tokens{rate}; {kernels}"


class Writer:
    """Continues prompts; a row's tokens depend on the seed and its number, not on its batch, but for xla's rounding."""

    def __init__(self, decoder: Decoder, tokenizer: Any, settings: Settings):
        """Prepare the generator.

        Raises:
          ValueError: the sampling is out of range.
        """
        self.context = decoder.model.max_seq_len
        self._tokenizer, self._settings = tokenizer, settings
        make = decoder.sample.Generator
        self._generator = make(decoder.model, eos_id=tuple(tokenizer.end_ids), sampling=settings.sampling)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        *,
        is_chat: Sequence[bool] | None = None,
        step: int = BATCHED,
        show: Callable[[str], None] | None = None,
    ) -> tuple[list[Text], Timing]:
        """Continue each prompt (token ids), whose numbers in the run are `rows`.

        Args:
          is_chat: for each prompt, whether its continuation is a message, a separate text; None = all continue their
            prompts' texts.
          step: tokens between two reads of the rows.
          show: is called with each piece of the first row's text, once it is final.

        Raises:
          ValueError: a prompt is empty or does not fit the model's context.
        """
        settings, most = self._settings, self._settings.new_tokens
        for row, prompt in zip(rows, prompts):
            requests.check_room(prompt, f"row {row}", new_tokens=most, context=self.context)
        alone = [False] * len(prompts) if is_chat is None else is_chat
        befores = [() if each else prompt for each, prompt in zip(alone, prompts, strict=True)]
        texts = [Text(self._tokenizer, settings.stop, prompt=before) for before in befores]
        self._generator.compile(len(prompts), max(map(len, prompts)), most)
        started = time.perf_counter()
        state = self._generator.prefill(prompts, max_new_tokens=most, seed=settings.seed, row_ids=list(rows))
        limit, first = 1, None
        while True:
            tokens, lengths = _host(state.tokens), _host(state.lengths)
            first = first or time.perf_counter()
            for row, (prompt, text) in enumerate(zip(prompts, texts)):
                piece = text.update(tokens[row, len(prompt) : lengths[row]].tolist(), is_full=limit >= most)
                if show is not None and row == 0 and piece:
                    show(piece)
            if all(text.ended for text in texts):
                break
            limit = min(limit + step, most)
            state = self._generator.decode(state, limit)
        ended = time.perf_counter()
        asked, kept = sum(map(len, prompts)), sum(len(text.ids) for text in texts)
        decoded = int(lengths[: len(prompts)].sum()) - asked - len(prompts)  # the first of each row is prompt_s's
        return texts, Timing(asked, kept, first - started, ended - first, decoded)


def _host(x: Any) -> np.ndarray:
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)
