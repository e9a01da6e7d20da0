"""A watermark in a decoding loop that is not sample.Generator's. Twin: torch_ref/watermark/host_loop.py.

The twin is a LogitsProcessor of transformers; this one serves any loop that calls it once a token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxbench.watermark.keys import Key
from jaxbench.watermark.logits_processor import Watermark
from jaxbench.watermark.reference import MAX_WIDTH


class HostLoop:
    """Turns the logits of one token after another into logits whose ordinary draw is marked; use one for each text.

    The loop may divide by the temperature and filter afterwards; it must not do so before. Rows padded on the left are
    marked too, with their padding as context at the start.

    Where the loop has several rows for each key (num_return_sequences or num_beams of transformers, which put those of
    one prompt next to each other), they share it. gumbel then draws them alike wherever their contexts are alike: give
    each row a key of its own where they are to differ.
    """

    def __init__(
        self,
        watermark: Watermark,
        keys: Sequence[Key | None],
        *,
        payloads: Sequence[int] | None = None,
        seed: int = 0,
        temperature: float = 1.0,
    ):
        """Take a watermark, a key for each row (None: not marked) and the temperature that the loop will divide by.

        Raises:
          ValueError: the temperature is not above 0 although the scheme draws, or see Watermark.state.
        """
        if watermark.draws and temperature <= 0:
            name = watermark.scheme.scheme
            raise ValueError(f"watermark {name}: temperature={temperature} leaves nothing to draw, wanted above 0")
        self._watermark, self._temperature, self._prompt_length = watermark, temperature, -1
        self._keys, self._payloads, self._seed = list(keys), payloads, seed
        self._state = watermark.state(keys, payloads=payloads, seed=seed)
        shared = getattr(watermark, "shared", None)
        self._given = (
            (lambda state: state) if shared is None else functools.partial(lambda x, state: (x, state), shared)
        )

    def __call__(self, input_ids: Int[Array, "B T"], scores: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits of the next token, marked; input_ids are prompt and continuation so far."""
        if self._prompt_length < 0:
            self._prompt_length = input_ids.shape[1]
            self._share_keys(input_ids.shape[0])
        recent = input_ids[:, -MAX_WIDTH:]  # no rule looks farther back; one shape for all steps
        length = jnp.full((recent.shape[0],), recent.shape[1], jnp.int32)
        recent = jnp.pad(recent, ((0, 0), (0, MAX_WIDTH - recent.shape[1])))
        step = jnp.int32(input_ids.shape[1] - self._prompt_length)
        scale = self._temperature if self._watermark.draws else 1.0
        scaled = scores / scale
        given = (self._given(self._state), scaled, recent, length, step)
        self._state, marked = jax.jit(self._watermark.reweight)(*given)
        return jnp.where(marked == scaled, scores, marked * scale)  # what is not changed stays exactly as it is

    def _share_keys(self, rows: int) -> None:
        """Give every row of a first call a key."""
        number = len(self._keys)
        if rows % number:
            raise ValueError(f"watermark: {rows} rows for {number} keys, wanted as many, or a multiple of them")
        if rows > number:
            times = range(rows // number)
            keys = [key for key in self._keys for _ in times]
            payloads = None if self._payloads is None else [one for one in self._payloads for _ in times]
            self._state = self._watermark.state(keys, payloads=payloads, seed=self._seed)
