"""What each scheme's file here and in torch_ref/watermark/device/ offers: a class `Mark` on a device (S file).

Arrays are JAX's or PyTorch's; logits [B V] are those of the next token. A state has a row for each text: marked bool
[B], keys of 32-bit words [B 4] (both halves of the first and of the second key), and what watermark_base.py and
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
    step: Any  # tokens generated, an integer


class KeyedStep(NamedTuple):
    """What the rows of a batch draw their next token with."""

    key: tuple[Any, Any]  # words [B 1] each
    seeds: Any  # of their contexts, words [B S]
    is_active: Bool[Any, " B"]  # rows that are drawn with their key


def first_key(state: State) -> tuple[Any, Any]:
    """First key of each row, two words [B 1]."""
    return state["keys"][:, :1], state["keys"][:, 1:2]


def active_rows(scheme: Scheme, state: State, at: Position) -> Bool[Any, " B"]:
    """Which rows have a key and a full context."""
    return state["marked"] & (at.length >= scheme.context_length)


class BaseMark:
    """One scheme on a device, for one vocabulary.

    Attributes:
      shared: arrays that all rows read, where the scheme has lists of its own; `apply` then gets (shared, state).
    """

    shared: State | None = None

    def __init__(self, scheme: Scheme, *, vocab_size: int, green_lists: Any = None, device: str = "cpu"):
        self.scheme, self.vocab_size = scheme, vocab_size

    def first_state(self, state: State) -> State:
        """State before the first token: with what this scheme carries from token to token."""
        return state

    def green_tokens(self, state: State, at: Position) -> Bool[Any, "B V"]:
        """Tokens that are green in rows that are marked here, none in other rows (schemes that do not draw)."""

    def apply(self, state: Any, logits: Float[Any, "B V"], at: Position) -> tuple[State, Float[Any, "B V"]]:
        """Next state, and logits with `delta` added to those of green tokens (schemes that do not draw)."""

    def draw(self, state: State, logits: Float[Any, "B V"], at: Position, sample: Any) -> tuple[State, Int[Any, " B"]]:
        """Next state, and tokens, -1 for rows that it leaves to others (schemes that draw); `sample`: OrdinaryDraw."""

    def reweight(self, state: State, logits: Float[Any, "B V"], at: Position) -> tuple[State, Float[Any, "B V"]]:
        """Next state, and logits whose ordinary draw is marked (schemes that draw)."""

    def text_words(self, key: tuple[Any, Any], text: Any) -> tuple[Any, Any]:
        """Words and seeds of the tokens of texts (prf.Text); for schemes without lists of their own."""
