"""The backend-independent part of a watermark: states for a batch of keys, and calls of the scheme's Mark (S file).

logits_processor.py and host_loop.py, here and in torch_ref, add the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxbench import philox
from jaxbench.watermark import config, reference
from jaxbench.watermark.device.contract import BaseMark, Position, State
from jaxbench.watermark.green_lists import GreenLists
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme, SchemeLike

UNMARKED = Key(0)  # placeholder in the arrays for rows without a key; never read


class WatermarkBase:
    """A logits processor of sample.Generator that marks text with one scheme.

    Attributes:
      draws: True if it replaces the draw of tokens (gumbel, synthid, dip).
      shared: the bit table of kgw_markllm and kgw_transformers, None for others.
    """

    def __init__(
        self,
        scheme: SchemeLike,
        *,
        vocab_size: int,
        green_lists: GreenLists | None,
        mark_of: Callable[..., BaseMark],
    ):
        self.scheme, self.vocab_size = config.parse_scheme(scheme), vocab_size
        self.draws = self.scheme.draws
        _check_generation(self.scheme, vocab_size, green_lists)
        self._mark = mark_of(self.scheme, vocab_size=vocab_size, green_lists=green_lists)
        self.shared = self._mark.shared

    def _on_device(self, array: np.ndarray) -> Any:
        """Move an array of a state to the device."""

    def state(
        self,
        keys: Sequence[Key | None],
        *,
        payloads: Sequence[int] | None = None,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        batch_size: int = 0,
    ) -> State:
        """Return the state of a batch before its first token: arrays with one row per key; key None = not marked.

        Args:
          payloads: the message of each row, 0 <= payload < 2**payload_bits.
          seed, row_ids: of the ordinary randomness that chooses between the two keys of a dual-key scheme.
          batch_size: pad with unmarked rows to this many.

        Returns:
          marked bool [B]; keys uint32 [B 4], both halves of the first and of the second key; if the scheme has them:
          payload int32 [B]; route uint32 [B 3], the seed's halves and the row number; green bool [B V].

        Raises:
          ValueError: there is no row, or a payload does not fit the scheme.
        """
        scheme, keys = self.scheme, [*keys, *[None] * (batch_size - len(keys))]
        if not keys:
            raise ValueError(f"watermark {scheme.scheme}: wanted at least one row, got keys={list(keys)}")
        own = [UNMARKED if key is None else key for key in keys]
        pairs = [reference.generation_keys(scheme, key) for key in own]
        state = {
            "marked": np.array([key is not None for key in keys]),
            "keys": np.array([first.halves + second.halves for first, second in pairs], np.uint32),
        }
        messages = self._messages(payloads, len(keys))
        if config.num_payloads(scheme) > 1:
            state["payload"] = np.array(messages, np.int32)
        if reference.is_dual_key(scheme):
            numbers = range(len(keys)) if row_ids is None else [*row_ids, *[0] * (len(keys) - len(row_ids))]
            state["route"] = np.array([(*philox.split_seed(seed), row) for row in numbers], np.uint32)
        if scheme.has_fixed_list:
            lists = {key: scheme.green_list(key, self.vocab_size) for key in set(own)}
            state["green"] = np.stack([lists[key] for key in own])
        return self._mark.first_state({name: self._on_device(array) for name, array in state.items()})

    def _messages(self, payloads: Sequence[int] | None, rows: int) -> list[int]:
        """Check the payloads and return one per row; 0 if none was given."""
        name, limit = self.scheme.scheme, config.num_payloads(self.scheme)
        messages = [0] * rows if payloads is None else [*payloads, *[0] * (rows - len(payloads))]
        if len(messages) != rows or not all(0 <= message < limit for message in messages):
            raise ValueError(
                f"watermark {name}: payloads={list(payloads or [])} for {rows} rows, wanted one a row in "
                f"[0, {limit}) (payload_bits={limit.bit_length() - 1})"
            )
        if limit > self.vocab_size:
            raise ValueError(f"watermark {name}: {limit} payloads are more than the {self.vocab_size} tokens")
        return messages

    def init(self, batch_size: int) -> State:
        """Raise: a state needs keys, which the generator does not have.

        Raises:
          ValueError: always; pass states.
        """
        raise ValueError(
            f"watermark {self.scheme.scheme}: {batch_size} rows have no keys; pass "
            "processor_states=[watermark.state(keys)] to the generator"
        )

    def apply(
        self, state: Any, logits: Float[Any, "B V"], tokens: Int[Any, "B W"], length: Int[Any, " B"], step: Any
    ) -> tuple[State, Float[Any, "B V"]]:
        """Return state and logits that make green tokens more likely; a scheme that draws changes nothing here."""
        return (state, logits) if self.draws else self._mark.apply(state, logits, Position(tokens, length, step))

    def draw(
        self,
        state: State,
        logits: Float[Any, "B V"],
        tokens: Int[Any, "B W"],
        length: Int[Any, " B"],
        step: Any,
        sample: Any,
    ) -> tuple[State, Int[Any, " B"]]:
        """Return the next state, and tokens of rows with a key; -1 for others and for steps that mark no row.

        Logits are those after temperature and filters; `sample` is the generator's OrdinaryDraw. In a step that marks
        some rows, rows with a key that cannot be marked (repeated context, text too short) get their ordinary token
        from the same draw: a second draw would double the cost of the watermark.
        """
        return self._mark.draw(state, logits, Position(tokens, length, step), sample)

    def reweight(
        self, state: Any, logits: Float[Any, "B V"], tokens: Int[Any, "B W"], length: Int[Any, " B"], step: Any
    ) -> tuple[State, Float[Any, "B V"]]:
        """Return the next state and logits whose ordinary draw is marked: `apply` and `draw` for other decoding loops.

        If the draw itself is keyed (gumbel), the logits of all tokens but the drawn one are -inf.
        """
        change = self._mark.reweight if self.draws else self._mark.apply
        return change(state, logits, Position(tokens, length, step))


class HostLoopBase:
    """Turns the logits of each step into logits whose ordinary draw is marked; create one per generated batch.

    The loop may divide by the temperature and filter afterwards, but not before. Left-padded rows are marked too, with
    their padding as context at the start.

    If the loop has several rows per key (num_return_sequences or num_beams of transformers, which put the rows of one
    prompt next to each other), these rows share the key. gumbel then draws the same token in rows with the same
    context: give each row a separate key if they are to differ.
    """

    def __init__(
        self,
        watermark: WatermarkBase,
        keys: Sequence[Key | None],
        *,
        payloads: Sequence[int] | None = None,
        seed: int = 0,
        temperature: float = 1.0,
    ):
        """Keep a watermark, a key per row (None: not marked) and the temperature that the loop will divide by.

        Raises:
          ValueError: the temperature is not above 0 although the scheme draws, or as Watermark.state.
        """
        if watermark.draws and temperature <= 0:
            name = watermark.scheme.scheme
            raise ValueError(f"watermark {name}: temperature={temperature} leaves nothing to draw, wanted above 0")
        self._watermark, self._scale, self._prompt_length = watermark, temperature if watermark.draws else 1.0, -1
        self._rows = 0
        self._keys, self._payloads, self._seed = list(keys), payloads, seed
        self._state = watermark.state(keys, payloads=payloads, seed=seed)

    def _begin(self, input_ids: Int[Any, "B T"]) -> tuple[Any, int]:
        """Return the state to pass to the watermark at this step, and the step number.

        Raises:
          ValueError: the rows are not those of the first call, or are shorter than their prompts.
        """
        rows, length = input_ids.shape
        if self._prompt_length < 0:
            self._prompt_length, self._rows = length, rows
            self._share_keys(rows)
        if rows != self._rows or length < self._prompt_length:  # its contexts would be counted from the other prompts
            raise ValueError(
                f"watermark: {rows} rows of {length} tokens after {self._rows} prompts of {self._prompt_length}; a "
                "HostLoop serves one batch, make another for each call of generate"
            )
        shared = self._watermark.shared
        return self._state if shared is None else (shared, self._state), length - self._prompt_length

    def _share_keys(self, rows: int) -> None:
        """Give every row of the first call a key."""
        number = len(self._keys)
        if rows % number:
            raise ValueError(f"watermark: {rows} rows for {number} keys, wanted as many, or a multiple of them")
        if rows > number:
            times = range(rows // number)
            keys = [key for key in self._keys for _ in times]
            payloads = None if self._payloads is None else [one for one in self._payloads for _ in times]
            self._state = self._watermark.state(keys, payloads=payloads, seed=self._seed)


def _check_generation(scheme: Scheme, vocab_size: int, green_lists: GreenLists | None) -> None:
    """Check that a scheme can mark text with a vocabulary size and green lists.

    Raises:
      ValueError: vocab_size is below 2, the scheme is for detection only, its lists are empty, missing or of another
        vocabulary, or f_scheme=time of several tokens meets a vocabulary above 2**16.
    """
    name = scheme.scheme
    if vocab_size < 2:
        raise ValueError(f"watermark {name}: vocab_size={vocab_size}, wanted at least 2")
    if scheme.has_list_words and int(scheme.gamma * vocab_size) == 0:
        raise ValueError(
            f"watermark {name}: gamma={scheme.gamma:g} of {vocab_size} tokens is a list of none, which marks nothing; "
            f"wanted at least {1 / vocab_size:.3g}"
        )
    if scheme.key_field is None:
        return
    if green_lists is None:
        raise ValueError(f"watermark {name}: wanted the tables of its green lists (GreenLists), got {green_lists}")
    config.check_generates(scheme, f"watermark {name}")
    if green_lists.vocab_size != vocab_size:
        raise ValueError(f"watermark {name}: tables of {green_lists.vocab_size} tokens for a model of {vocab_size}")
    if green_lists.rule.combine == "time" and green_lists.width > 1 and vocab_size > 2**16:
        raise ValueError(
            f"watermark {name}: f_scheme=time multiplies in 32 bits, vocab_size={vocab_size} is above 65536"
        )
