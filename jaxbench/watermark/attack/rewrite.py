"""Rewriting by a language model: paraphrase and back-translation.

A text is cut into blocks of sentences; each block is one prompt in the model's chat format, and all blocks of all texts
run in batches. A block's draw depends on (seed, text index, block), not on its batch. Small models rewrite loosely; the
realised edit rate, which every attack reports, shows how much. No twin: an attack is not part of a model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxbench import sample
from jaxbench.generation import decoder, flax_decoder
from jaxbench.pretrained import tokenizer
from jaxbench.watermark.attack.attacks import Rewrite
from jaxbench.watermark.attack.random_draws import Draws

PARAPHRASE = "Rewrite the following text in other words. Keep its meaning. Answer with the new text only.\n\n{text}"
TRANSLATE = "Translate the following text into {language}. Answer with the translation only.\n\n{text}"
MAX_BLOCKS = 4096  # per text: row ids are text * MAX_BLOCKS + block
LONGEST = 400  # words, the largest block_words; a sentence up to this length is never split
GROWTH = 1.5  # a reply may have this many times the tokens of its block


class Rewriter:
    """A model that rewrites texts; loaded at first use and kept."""

    def __init__(self, model: str | Path | None, *, choice: decoder.Choice = decoder.XLA, batch_size: int = 16):
        """Keep the settings: a model as weights.load_checkpoint takes it, and how many blocks to rewrite at once.

        Raises:
          ValueError: the kernels do not support batch_size rows.
        """
        decoder.check_rows(choice, batch_size, "rewriting.batch_size")
        self._spec, self._choice, self._batch_size = model, choice, batch_size
        self._generator = functools.cache(self._new_generator)

    def __call__(
        self, attack: Rewrite, texts: Sequence[str], *, seed: int, indices: Sequence[int] | None = None
    ) -> list[str]:
        """Rewrite each block of the texts with probability `attack.strength`.

        A block stays as it was if any step has no reply: half a back-translation would leave the language in between.

        Raises:
          ValueError: the model's context does not take a block and its reply.
        """
        numbers = list(range(len(texts))) if indices is None else list(indices)
        pieces = [blocks(text, attack.block_words) for text in texts]
        chosen = []
        for row, (number, own) in enumerate(zip(numbers, pieces)):
            draws = Draws(seed, step=0, site=f"watermark/attack/{attack.attack}/blocks", row=number)
            chosen += [(row, i) for i in (draws.uniform(len(own)) < attack.strength).nonzero()[0].tolist()]
        row_ids = [numbers[row] * MAX_BLOCKS + i for row, i in chosen]
        words = [pieces[row][i] for row, i in chosen]
        steps = [PARAPHRASE]
        if attack.attack == "back_translate":
            steps = [TRANSLATE.replace("{language}", attack.pivot), TRANSLATE.replace("{language}", "English")]
        replies, is_answered = words, [True] * len(words)
        for place, instruction in enumerate(steps):
            prompts = [instruction.replace("{text}", text.strip()) for text in replies]
            said = self._answer(prompts, replies, row_ids, seed=(seed + place) % 2**64, temperature=attack.temperature)
            is_answered = [bool(new) and before for new, before in zip(said, is_answered)]
            replies = [new or old for new, old in zip(said, replies)]
        for (row, i), new, old, is_new in zip(chosen, replies, words, is_answered):
            if is_new:
                pieces[row][i] = old[: len(old) - len(old.lstrip())] + new.strip()
        return ["".join(own) for own in pieces]

    def _answer(
        self, prompts: list[str], originals: list[str], row_ids: list[int], *, seed: int, temperature: float
    ) -> list[str]:
        """Return the model's cleaned replies; prompts of similar length share a batch."""
        generator = self._generator(temperature)
        messages = [self._tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        ids = [self._tokenizer.encode(message, add_special=False) for message in messages]
        encoded = self._tokenizer.encode_batch(originals, add_special=False)
        limits = [16 * -(-int(GROWTH * len(own) + 1) // 16) for own in encoded]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        replies = [""] * len(ids)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            limit = max(limits[i] for i in batch)
            longest, row = len(ids[batch[-1]]), row_ids[batch[-1]] // MAX_BLOCKS
            if longest + limit > self._model.max_seq_len:
                raise ValueError(
                    f"rewrite: text {row} (from 0) has a block of {longest} tokens, which with a reply of {limit} is "
                    f"more than the model's context of {self._model.max_seq_len}; cut the text, or name another model"
                )
            made = generator(
                [ids[i] for i in batch],
                max_new_tokens=limit,
                seed=seed,
                row_ids=[row_ids[i] & 0x7FFFFFFF for i in batch],
            )
            for i, tokens, length in zip(batch, made.tokens, made.lengths):
                own = tokens[: min(length, limits[i])]  # a longer block in the batch lengthens no reply
                replies[i] = clean(self._tokenizer.decode(own, skip_special=True))
        return replies

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return tokenizer.load_tokenizer(self._spec)

    @functools.cached_property
    def _model(self) -> Any:
        return flax_decoder.load(self._spec, self._choice).model

    def _new_generator(self, temperature: float) -> sample.Generator:
        sampling = sample.SamplingParams(temperature=temperature)
        return sample.Generator(self._model, eos_id=self._tokenizer.end_ids, sampling=sampling)


def blocks(text: str, words: int) -> list[str]:
    """Cut a text at sentence ends into blocks of about `words` words; joined, they are the text again.

    A sentence of more than LONGEST words, such as a list without a full stop, is cut into pieces of `words` words.
    """
    whole = re.findall(r".+?(?:[.!?]+[\"')\]]*(?=\s)|\Z)", text, flags=re.DOTALL)
    sentences = [piece for sentence in whole for piece in _pieces(sentence, words)]
    found: list[str] = []
    count = 0
    for sentence in sentences:
        size = len(sentence.split())
        if found and count and count + size <= words:
            found[-1] += sentence
            count += size
        else:
            found.append(sentence)
            count = size
    return found


def _pieces(sentence: str, words: int) -> list[str]:
    starts = [found.start() for found in re.finditer(r"\s*\S+", sentence)]
    if len(starts) <= LONGEST:
        return [sentence]
    cuts = starts[::words]
    return [sentence[start:end] for start, end in zip(cuts, [*cuts[1:], len(sentence)])]


def clean(reply: str) -> str:
    """Strip the quotation marks and the lead-in that chat models tend to add to a reply."""
    reply = re.sub(r"^\s*(sure|certainly|of course|here)[^\n:]{0,80}:\s+", "", reply.strip(), flags=re.IGNORECASE)
    if len(reply) > 1 and reply[0] == reply[-1] == '"':
        reply = reply[1:-1]
    return reply.strip()
