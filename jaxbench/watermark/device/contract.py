"""The interface of each scheme's file here and in torch_ref/watermark/device/: a class `Mark` on a device (S file).

Arrays are JAX's or PyTorch's; logits [B V] are those of the next token. A state has one row per text: marked bool [B],
keys of 32-bit words [B 4] (both halves of the first and of the second key), and what watermark_base.py and
`first_state` add.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int

from jaxbench.watermark.schemes.contract import Scheme

State = dict[str, Any]


class Position(NamedTuple):
    """Where the rows of a batch are: the next token of row b follows tokens[b, :length[b]]."""

    tokens: Int[Any, "B W"]
    length: Int[Any, " B"]
    step: Any  # number of tokens generated so far


class KeyedStep(NamedTuple):
    """Keys and seeds for drawing the next token of each row of a batch."""

    key: tuple[Any, Any]  # words [B 1] each
    seeds: Any  # seeds of the contexts, words [B S]
    is_active: Bool[Any, " B"]  # rows that draw with their key at this step


def first_key(state: State) -> tuple[Any, Any]:
    """Return the first key of each row, two words [B 1]."""
    return state["keys"][:, :1], state["keys"][:, 1:2]


def active_rows(scheme: Scheme, state: State, at: Position) -> Bool[Any, " B"]:
    """Return which rows have a key and a full context."""
    return state["marked"] & (at.length >= scheme.context_length)


class BaseMark:
    """One scheme on a device, for one vocabulary.

    Attributes:
      shared: arrays that all rows read, for kgw_markllm and kgw_transformers; their `apply` gets (shared, state).
    """

    shared: State | None = None

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"):
        self.scheme, self.vocab_size = scheme, vocab_size

    def first_state(self, state: State) -> State:
        """Return the state before the first token, extended by what this scheme carries from token to token."""
        return state

    def green_tokens(self, state: State, at: Position) -> Bool[Any, "B V"]:
        """Return the green tokens of rows marked at this step, none in other rows (schemes that do not draw)."""

    def apply(self, state: Any, logits: Float[Any, "B V"], at: Position) -> tuple[State, Float[Any, "B V"]]:
        """Return the next state, and logits with green tokens made more likely (schemes that do not draw)."""

    def draw(self, state: State, logits: Float[Any, "B V"], at: Position, sample: Any) -> tuple[State, Int[Any, " B"]]:
        """Return the next state and tokens, -1 for rows not drawn here (schemes that draw); `sample`: OrdinaryDraw."""

    def reweight(self, state: State, logits: Float[Any, "B V"], at: Position) -> tuple[State, Float[Any, "B V"]]:
        """Return the next state, and logits whose ordinary draw is marked (schemes that draw)."""

    def text_words(self, key: tuple[Any, Any], text: Any) -> tuple[Any, Any]:
        """Return words and seeds of the tokens of texts (prf.Text); not for kgw_markllm and kgw_transformers."""
