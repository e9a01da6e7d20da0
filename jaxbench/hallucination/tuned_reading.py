"""Prepare responses for a tuned reader, and score their tokens with it (S file).

The backend's modules are imported by the name of its package. Axis letters: tuned_inputs.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxbench.hallucination import encoding, layout, tuned_inputs
from jaxbench.hallucination.group import Group
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.tuned_inputs import Row, TunedConfig
from jaxbench.hallucination.where import Where

Array = np.ndarray


class Read(NamedTuple):
    """A prompt and its responses, read by the blocks below the tuned ones."""

    keys: Float[Array, "L K H P"]
    values: Float[Array, "L K P H"]
    stream: Float[Array, "T D"]  # of all responses' tokens, one response after the other
    lengths: Int[Array, " R"]  # tokens of each response

    @property
    def slices(self) -> list[slice]:
        """Where each response's tokens are in `stream`."""
        return layout.places([range(length) for length in self.lengths])

    def row(self, members: Sequence[int], labels: Sequence[Array] | None = None) -> Row:
        """Return some of the responses as a row; labels: of each response's tokens, None = nothing is labelled."""
        parts = [self.stream[self.slices[i]] for i in members]
        labels = [np.zeros(len(part), bool) for part in parts] if labels is None else labels
        return Row(np.concatenate(parts), self.keys, self.values, tuple(map(len, parts)), labels)


class LowerReading:
    """A reader of groups with one backend's LowerReader; it caches the last prompt."""

    def __init__(self, reader: Any, tokenizer: Any, window: int, settings: ReaderSettings):
        """window: tokens of prompt and response."""
        self._reader, self._tokenizer, self._window, self._settings = reader, tokenizer, window, settings
        self._last: tuple[Any, Any] = (None, None)  # the prompt's token ids, the reader's result

    def read(self, group: Group) -> list[tuple[tuple[int, ...], Read]]:
        """Read a group; return response numbers with their Read: all together, or one each if the context must be cut.

        Raises:
          ValueError: as encoding.encode_prompt and encode_response.
        """
        responses = [encoding.encode_response(self._tokenizer, each).ids for each in group.responses]
        longest = max(map(len, responses))
        prompt = encoding.encode_prompt(
            self._tokenizer, group.context, group.question, window=self._window - longest, style=self._settings.style
        )
        if prompt.num_cut and len(responses) > 1:
            alone = [group._replace(responses=(each,)) for each in group.responses]
            return [((i,), read) for i, one in enumerate(alone) for _, read in self.read(one)]
        ids = tuple(prompt.text.ids)
        last = self._last  # in a local variable: threads may share this object
        if last[0] != ids:
            whole = layout.Text([*ids, 0], prompt.text.context)  # read_prompt leaves out a prompt's last token
            last = self._last = (ids, self._reader.read_prompt(layout.prompt_arrays([whole], share=1.0)))
        handle, stream = last[1], [np.zeros(0)] * len(responses)
        for row in layout.pack(list(map(len, responses)), self._settings.row_tokens):
            packed = [responses[i] for i in row]
            found = self._reader.stream(handle, _every_token(len(ids), packed))[0]
            for i, place in zip(row, layout.places(packed)):
                stream[i] = found[place]
        lengths = np.array(list(map(len, responses)), np.int32)
        read = Read(*self._reader.cached(handle, len(ids)), np.concatenate(stream), lengths)
        return [(tuple(range(len(responses))), read)]


def _every_token(prompt: int, responses: Sequence[Sequence[int]]) -> layout.ResponseArrays:
    """Build a row in which every token of the responses is read, including the last ones."""
    size = layout.bucket(sum(map(len, responses)), layout.RESPONSE_SIZES)
    tokens, segments = np.zeros((2, 1, size), np.int32)
    positions, is_token = np.full((1, size), -1, np.int32), np.zeros((1, size), bool)
    for number, (place, each) in enumerate(zip(layout.places(responses), responses)):
        tokens[0, place], segments[0, place], is_token[0, place] = each, number, True
        positions[0, place] = prompt + np.arange(len(each))
    return layout.ResponseArrays(tokens, tokens, positions, segments, is_token)


class TokenReader:
    """A tuned reader with the blocks below it: from texts to log-odds of tokens."""

    def __init__(self, lower: LowerReading, score: Any, row_tokens: int):
        """score: what a backend's tuned_reader.scorer returns."""
        self._lower, self._score, self._row_tokens = lower, score, row_tokens

    def __call__(self, group: Group) -> list[Float[Array, " T"]]:
        """Log-odds of the tokens of each response.

        Raises:
          ValueError: as LowerReading.read.
        """
        found = [np.zeros(0)] * len(group.responses)
        for numbers, read in self._lower.read(group):
            for row in layout.pack(read.lengths.tolist(), self._row_tokens):
                made = read.row(row)
                size = layout.bucket(sum(made.lengths), layout.RESPONSE_SIZES)
                prompt = layout.bucket(read.keys.shape[-1], tuned_inputs.PROMPT_SIZES)
                said = self._score(tuned_inputs.padded([made], prompt_size=prompt, size=size))[0]
                for i, place in zip(row, layout.places([range(length) for length in made.lengths])):
                    found[numbers[i]] = said[place]
        return found


def load_lower(settings: ReaderSettings, first: int, stop: int, *, package: str, where: Where | None = None) -> Any:
    """Load the blocks of settings' model up to the last tuned one, without adapters, as a LowerReading.

    first, stop: the first tuned block and the one after the last.
    """
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer

    checkpoint = weights.load_checkpoint(settings.model)
    kept = {
        name: x for name, x in checkpoint.params.items()
        if not name.startswith("layers.") or int(name.split(".")[1]) < stop
    }  # fmt: skip
    names = ("transformer", "hallucination.lower_reader")
    transformer, lower_reader = (importlib.import_module(f"{package}.{name}") for name in names)
    decoder = checkpoint.config.model_copy(update={"num_layers": stop})
    model = _placed(transformer.build(decoder, kept, dtype=settings.dtype), package, where)
    window = settings.window or checkpoint.config.max_seq_len
    made = lower_reader.LowerReader(model, first=first)
    return LowerReading(made, load_tokenizer(settings.model), window, settings)


def load_reader(
    settings: ReaderSettings, config: TunedConfig, trained: Mapping[str, Array], *, package: str,
    where: Where | None = None,
) -> TokenReader:  # fmt: skip
    """Load the tuned reader of settings' model; trained: adapters and head only."""
    from jaxbench.pretrained import weights

    lower = load_lower(settings, config.first, config.blocks.stop, package=package, where=where)
    params = tuned_inputs.with_trained(config, weights.load_checkpoint(settings.model).params, trained)
    module = importlib.import_module(f"{package}.hallucination.tuned_reader")
    model = _placed(module.build(config, params, dtype=settings.dtype), package, where)
    return TokenReader(lower, module.scorer(model), settings.row_tokens)


def _placed(model: Any, package: str, where: Where | None) -> Any:
    if where is None:
        return model
    placement = importlib.import_module(f"{package}.hallucination.placement")
    return placement.placed(model, placement.devices(where.device)[0], offload_layers=0)
