"""Measure the time that a watermark adds to a decode step: isolated, and end to end versus plain decoding.

Isolated: a compiled loop over the last part of the generator's step (processors, filters, draw), with and without a
watermark, over changing logits; the difference is what the watermark adds. End to end: whole decode calls of the model,
alternating plain and marked.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbench import sample
from jaxbench.generation import decoder, flax_decoder
from jaxbench.measure import process, worker
from jaxbench.watermark import config
from jaxbench.watermark.green_lists import lists_of
from jaxbench.watermark.keys import Key
from jaxbench.watermark.logits_processor import Watermark

NUM_BANKS = 4  # sets of logits that the isolated loop cycles through, so that nothing in a step is constant
SPREAD = 2.5  # standard deviation of these logits, about that of a small language model


class Generation:
    """A model with plain programs as the baseline for each watermark."""

    def start(self, *, model: str, choice: dict) -> dict:
        """Load the model; choice: the fields of a decoder.Choice."""
        self.hold(flax_decoder.load(model, decoder.Choice(**choice)).model)
        return {}

    def hold(self, model: Any) -> None:
        """Use a model that is already loaded."""
        self.model, self.vocab_size = model, model.vocab_size
        self.plain = self._generator(())

    def overhead(
        self, *, scheme: dict, prompts: list, new_tokens: int, rounds: int, loop_steps: int, loop_rounds: int
    ) -> dict:
        """Measure seconds per step, one number per round: plain and marked decoding, plain and marked isolated loops.

        The scheme `control` marks nothing: plain versus plain.
        """
        states: tuple = ()
        marked = self._generator(())
        if scheme["scheme"] != "control":
            watermark, state = self._watermark(scheme, len(prompts))
            marked, states = self._generator((watermark,)), (state,)
        calls = {
            "plain_step": functools.partial(_decode, self.plain, prompts, new_tokens, None),
            "marked_step": functools.partial(_decode, marked, prompts, new_tokens, states or None),
        }
        seconds = _in_turn(calls, rounds)
        loops = {
            "plain_loop": _loop(self.plain, len(prompts), self.vocab_size, (), loop_steps),
            "marked_loop": _loop(marked, len(prompts), self.vocab_size, states, loop_steps),
        }
        return seconds | _in_turn(loops, loop_rounds)

    def throughput(self, *, schemes: list, prompts: list, new_tokens: int, rounds: int) -> dict:
        """Measure seconds of whole calls, alternating schemes (control: unmarked), and peak process memory in bytes."""
        worker.reset_peak()
        calls = {}
        for number, scheme in enumerate(schemes):
            processors, states = (), None
            if scheme["scheme"] != "control":
                watermark, state = self._watermark(scheme, len(prompts))
                processors, states = (watermark,), (state,)
            generator = self._generator(processors)
            calls[str(number)] = functools.partial(_whole, generator, prompts, new_tokens, states)
        seconds = _in_turn(calls, rounds)
        return {"seconds": list(seconds.values()), "peak_rss": worker.peak_bytes()}

    def generate(self, *, scheme: dict, prompts: list, new_tokens: int, seed: int) -> dict:
        """Continue prompts (ids) with a watermark; return the new ids."""
        watermark, state = self._watermark(scheme, len(prompts))
        output = self._generator((watermark,))(prompts, max_new_tokens=new_tokens, seed=seed, processor_states=(state,))
        return {"ids": output.tokens.tolist()}

    def _watermark(self, scheme: dict, num_rows: int) -> tuple[Watermark, Any]:
        parsed = config.parse_scheme(scheme)
        lists = lists_of(parsed, vocab_size=self.vocab_size)
        watermark = Watermark(parsed, vocab_size=self.vocab_size, green_lists=lists)
        return watermark, watermark.state([Key(row + 1) for row in range(num_rows)])

    def _generator(self, processors: tuple) -> sample.Generator:
        return sample.Generator(
            self.model, eos_id=None, sampling=sample.SamplingParams(temperature=1.0), processors=processors
        )


def _in_turn(calls: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Time calls: each once to warm up, then all in every round, in an order that is rotated and reversed by round."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in process.turn(list(calls), number):
            seconds[name].append(calls[name]())
    return seconds


def _whole(generator: sample.Generator, prompts: list, new_tokens: int, states: Any) -> float:
    """Return the seconds of a call, including prefill."""
    start = time.perf_counter()
    generator(prompts, max_new_tokens=new_tokens, seed=0, processor_states=states)
    return time.perf_counter() - start


def _decode(generator: sample.Generator, prompts: list, new_tokens: int, states: Any) -> float:
    """Return the seconds per step of one decode call, excluding prefill."""
    state = generator.prefill(prompts, max_new_tokens=new_tokens, seed=0, processor_states=states)
    jax.block_until_ready(state)
    start = time.perf_counter()
    jax.block_until_ready(generator.decode(state, new_tokens))
    return (time.perf_counter() - start) / (new_tokens - 1)


def _loop(generator: sample.Generator, batch_size: int, vocab_size: int, states: tuple, steps: int) -> Any:
    """Return a call that runs the last part of a decode step `steps` times and returns the seconds per step."""
    random = np.random.default_rng(0)
    banks = jnp.asarray(SPREAD * random.standard_normal((NUM_BANKS, batch_size, vocab_size)), jnp.float32)
    context = np.zeros((batch_size, 8 + steps), np.int32)
    context[:, :8] = random.integers(0, vocab_size, (batch_size, 8))
    tokens, rows = jnp.asarray(context), jnp.arange(batch_size, dtype=jnp.int32)

    @jax.jit
    def run(shared: tuple, states: tuple, banks: jax.Array, tokens: jax.Array, key: jax.Array) -> jax.Array:
        state = sample.DecodeState(
            cache=(),
            tokens=tokens,
            lengths=jnp.full(batch_size, 8, jnp.int32),
            finished=jnp.zeros(batch_size, bool),
            step=jnp.int32(0),
            slot=jnp.int32(0),
            key=key,
            row_ids=rows,
            processor_states=jax.tree.map(jnp.asarray, states),
        )
        body = lambda i, state: generator._append(state, banks[i % NUM_BANKS], shared)
        return lax.fori_loop(0, steps, body, state).tokens

    # An argument, like the generator's key: XLA would fold a constant key into the ordinary draw, the baseline of the
    # keyed draw.
    key = jnp.zeros(2, jnp.uint32)

    def call() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(generator._shared, states, banks, tokens, key))
        return (time.perf_counter() - start) / steps

    return call
