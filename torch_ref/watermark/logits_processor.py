"""Watermarks as logits processors of sample.Generator. Twin: jaxbench/watermark/logits_processor.py.

One processor serves a batch in which every row has a key of its own, or none. Keys enter by `Watermark.state`. Schemes
of one batch chain: a processor each, and each row marked in one of them. What a scheme does to logits is in device/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench.watermark import config, states
from jaxbench.watermark.green_lists import GreenLists
from jaxbench.watermark.keys import Key
from torch_ref.sample import OrdinaryDraw
from torch_ref.watermark.device.marks import Position, State, mark_of


class Watermark:
    """A logits processor that marks text with one scheme.

    Attributes:
      draws: True where it replaces the draw of tokens (gumbel, synthid, dip).
      shared: the bit table of kgw_markllm and kgw_transformers.
    """

    def __init__(self, scheme: Any, *, vocab_size: int, green_lists: GreenLists | None = None, device: str = "cpu"):
        """Prepare a scheme (a name, a mapping or a configuration) for logits of vocab_size tokens.

        Raises:
          ValueError: the scheme is unknown or detection only, or its green lists are missing or of another vocabulary.
        """
        self.scheme, self.vocab_size = config.parse_scheme(scheme), vocab_size
        self.draws, self._device = self.scheme.draws, device
        states.check_generation(self.scheme, vocab_size, green_lists)
        self._mark = mark_of(self.scheme, vocab_size=vocab_size, green_lists=green_lists, device=device)
        if self.scheme.key_field is not None:
            self.shared = self._mark.shared

    def state(
        self,
        keys: Sequence[Key | None],
        *,
        payloads: Sequence[int] | None = None,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        batch_size: int = 0,
    ) -> State:
        """State of a batch before its first token, None = not marked; arguments and errors are those of the twin."""
        keys = [*keys, *[None] * (batch_size - len(keys))]
        options = {"vocab_size": self.vocab_size, "payloads": payloads, "seed": seed, "row_ids": row_ids}
        arrays = states.generation_state(self.scheme, keys, **options)
        state = {name: self._tensor(array) for name, array in arrays.items()}
        return self._mark.first_state(state)

    def _tensor(self, array: Any) -> Tensor:
        is_word = array.dtype.kind == "u"
        return torch.from_numpy(array.astype("int64") if is_word else array).to(self._device)

    def init(self, batch_size: int) -> State:
        """Raise: a batch has no keys of its own.

        Raises:
          ValueError: always; pass states.
        """
        raise ValueError(
            f"watermark {self.scheme.scheme}: {batch_size} rows have no keys; pass "
            "processor_states=[watermark.state(keys)] to the generator"
        )

    def apply(
        self, state: Any, logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B W"], length: Int[Tensor, " B"], step: int
    ) -> tuple[State, Float[Tensor, "B V"]]:
        """State and logits that make green tokens more likely; a scheme that draws changes nothing here."""
        return (state, logits) if self.draws else self._mark.apply(state, logits, Position(tokens, length, step))

    def draw(
        self,
        state: State,
        logits: Float[Tensor, "B V"],
        tokens: Int[Tensor, "B W"],
        length: Int[Tensor, " B"],
        step: int,
        sample: OrdinaryDraw,
    ) -> tuple[State, Int[Tensor, " B"]]:
        """Next state, and tokens of rows with a key, -1 for others and for steps that mark no row.

        Logits are those after temperature and filters. Where some rows are marked and some have nothing to be marked
        with (a known context, a text too short), the latter get their ordinary token from the same draw: a second one
        would double what the watermark costs.
        """
        return self._mark.draw(state, logits, Position(tokens, length, step), sample)

    def reweight(
        self, state: Any, logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B W"], length: Int[Tensor, " B"], step: int
    ) -> tuple[State, Float[Tensor, "B V"]]:
        """Next state and logits whose ordinary draw is marked: `apply` and `draw` for other decoding loops.

        Where the draw itself is keyed (gumbel), all tokens but the drawn one are -inf.
        """
        change = self._mark.reweight if self.draws else self._mark.apply
        return change(state, logits, Position(tokens, length, step))
