"""Tune a reader's upper blocks to labelled tokens: what is below them read once, adapters and head trained.

A source's file holds the prompt's keys and values of the tuned blocks and the residual stream in front of them of all
its responses, so that an epoch costs the tuned blocks alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx
from jax import Array
from safetensors.numpy import load_file, save_file

from jaxbench import config, outputs, prng, transformer
from jaxbench.hallucination import encoding, layout, reader, tuned_inputs, tuned_reader
from jaxbench.hallucination.group import Group
from jaxbench.hallucination.tuned_inputs import Row, TunedConfig, TunedOptimizer
from jaxbench.lora.config import ATTENTION, FEED_FORWARD, LoraConfig
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import StepConfig

PROMPT_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # that batches are padded to: one program each
WARMUP = 20  # steps


class Tuning(config.Base):
    """How a reader is tuned."""

    first: int = pydantic.Field(default=20, ge=0)  # the first tuned block
    num_blocks: int = pydantic.Field(default=4, ge=1)
    lora: LoraConfig = LoraConfig(rank=16, alpha=32.0, targets=(*ATTENTION, *FEED_FORWARD))
    epochs: int = pydantic.Field(default=2, ge=1)
    batch_rows: int = pydantic.Field(default=2, ge=1)  # rows of row_tokens
    row_tokens: int = pydantic.Field(default=512, ge=1)  # responses to one prompt share a row
    learning_rate: float = pydantic.Field(default=5e-4, gt=0)  # highest; falls linearly to 0
    weight_decay: float = pydantic.Field(default=0.01, ge=0)
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    dtype: str = "bfloat16"  # of products


class Place(NamedTuple):
    """A row of responses: where its numbers are."""

    path: Path  # of the source's file
    prompt: int  # tokens of the prompt
    members: tuple[int, ...]  # numbers of its responses among all
    slices: tuple[tuple[int, int], ...]  # where each one's tokens are in the file


class LowerReader:
    """The blocks below the tuned ones, and the prompt's keys and values of these; compiled once a size."""

    def __init__(self, decoder: Any, params: Mapping[str, np.ndarray], tuning: Tuning):
        self._blocks = slice(tuning.first, tuning.first + tuning.num_blocks)
        whole, lower = (_first_blocks(decoder, params, n, tuning.dtype) for n in (self._blocks.stop, tuning.first))
        self._prompt, self._stream = _program(whole, _read_prompt), _program(lower, _read_stream)
        self._tuning = tuning

    def read(self, group: Group, tokenizer: Any, window: int) -> dict[str, np.ndarray]:
        """What a source's file holds; bfloat16 as the bits of uint16."""
        responses = [encoding.encode_response(tokenizer, each).ids for each in group.responses]
        longest = max(map(len, responses))
        prompt = encoding.encode_prompt(tokenizer, group.context, group.question, window=window - longest).text
        text = layout.Text([*prompt.ids, 0], prompt.context)  # read_prompt leaves out a prompt's last token
        arrays = layout.prompt_arrays([text], share=1.0)
        read = self._prompt(*arrays[:3])
        used = len(prompt.ids)
        keys = np.stack([np.asarray(each)[:, :, :used] for each in read.cache.keys[self._blocks]])
        values = np.stack([np.asarray(each)[:, :used] for each in read.cache.values[self._blocks]])
        cache = read.cache._replace(
            keys=read.cache.keys[: self._tuning.first], values=read.cache.values[: self._tuning.first]
        )
        stream = [np.zeros(0)] * len(responses)
        for row in layout.pack([len(each) for each in responses], self._tuning.row_tokens):
            given = _responses(used, [responses[i] for i in row])
            found = np.asarray(self._stream(read._replace(cache=cache), given))[0]
            for i, place in zip(row, layout.places([responses[i] for i in row])):
                stream[i] = found[place]
        made = {"keys": keys, "values": values, "stream": np.concatenate(stream)}
        lengths = np.array([len(each) for each in responses], np.int32)
        return {name: each.view(np.uint16) if each.itemsize == 2 else each for name, each in made.items()} | {
            "lengths": lengths
        }


def _first_blocks(decoder: Any, params: Mapping[str, np.ndarray], count: int, dtype: str) -> Any:
    """A decoder of another's first blocks."""
    kept = {name: x for name, x in params.items() if not name.startswith("layers.") or int(name.split(".")[1]) < count}
    return transformer.build(decoder.model_copy(update={"num_layers": count}), kept, dtype=dtype)


def _program(model: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state, *arrays: run(nnx.merge(graph, state), *arrays))
    return functools.partial(compiled, state)


def _read_prompt(model: Any, tokens: Array, positions: Array, is_context: Array) -> reader.Prompt:
    return reader.read_prompt(model, tokens, positions, is_context)


def _read_stream(model: Any, prompt: reader.Prompt, responses: reader.Responses) -> Array:
    return reader.read_responses(model, prompt, responses).stream[-1]


def _responses(prompt: int, responses: Sequence[Sequence[int]]) -> reader.Responses:
    """One row in which every token of the responses is read, the last ones too."""
    size = layout.bucket(sum(map(len, responses)), layout.RESPONSE_SIZES)
    tokens, segments = np.zeros((2, 1, size), np.int32)
    positions, is_token = np.full((1, size), -1, np.int32), np.zeros((1, size), bool)
    for number, (place, each) in enumerate(zip(layout.places(responses), responses)):
        tokens[0, place], segments[0, place], is_token[0, place] = each, number, True
        positions[0, place] = prompt + np.arange(len(each))
    return reader.Responses(tokens, tokens, positions, segments, is_token)


def write(path: Path, found: Mapping[str, np.ndarray]) -> None:
    """Keep what LowerReader.read found, whole or not at all."""
    with outputs.whole(path) as temporary:
        save_file(dict(found), temporary)


def places(path: Path, members: Sequence[int], tuning: Tuning) -> list[Place]:
    """Rows of a source's responses; members: their numbers among all, in the file's order."""
    held = load_file(path)
    ends = np.cumsum(held["lengths"])
    slices = [(int(end - length), int(end)) for end, length in zip(ends, held["lengths"])]
    rows = layout.pack(held["lengths"].tolist(), tuning.row_tokens)
    prompt = held["keys"].shape[-1]
    return [Place(path, prompt, tuple(members[i] for i in row), tuple(slices[i] for i in row)) for row in rows]


def load(place: Place, labels: Sequence[np.ndarray], dtype: str) -> Row:
    """A row's numbers and the labels of its responses' tokens; labels: of all responses."""
    held = load_file(place.path)
    bits = {name: held[name].view(jnp.bfloat16) if dtype == "bfloat16" else held[name] for name in ("keys", "values")}
    stream = held["stream"].view(jnp.bfloat16) if dtype == "bfloat16" else held["stream"]
    parts = np.concatenate([stream[start:end] for start, end in place.slices])
    lengths = tuple(end - start for start, end in place.slices)
    return Row(parts, bits["keys"], bits["values"], lengths, [labels[i] for i in place.members])


def batches(rows: Sequence[Place], size: int, random: np.random.Generator | None) -> Iterator[tuple[int, list[Place]]]:
    """Yield rows by the size that their prompts are padded to, `size` at a time or fewer; shuffled, or in order."""
    by_size: dict[int, list[Place]] = {}
    for row in rows:
        by_size.setdefault(layout.bucket(row.prompt, PROMPT_SIZES), []).append(row)
    made = []
    for prompt, mine in sorted(by_size.items()):
        order = np.arange(len(mine)) if random is None else random.permutation(len(mine))
        made += [(prompt, [mine[i] for i in order[at : at + size]]) for at in range(0, len(mine), size)]
    yield from made if random is None else (made[i] for i in random.permutation(len(made)))


def _batch(prompt: int, rows: Sequence[Place], labels: Sequence[np.ndarray], tuning: Tuning) -> tuned_reader.Batch:
    """A batch of a full number of rows: those that are missing have no token."""
    loaded = [load(row, labels, tuning.dtype) for row in rows]
    longest = max(sum(row.lengths) for row in loaded)
    made = tuned_inputs.padded(loaded, prompt_size=prompt, size=max(tuning.row_tokens, longest))
    missing = tuning.batch_rows - len(rows)
    padding = [np.zeros((missing, *each.shape[1:]), each.dtype) for each in made]
    return tuned_reader.Batch(*(np.concatenate(pair) for pair in zip(made, padding)))


def fit(
    tuned: TunedConfig, start: Mapping[str, np.ndarray], rows: Sequence[Place], labels: Sequence[np.ndarray],
    tuning: Tuning, *, progress: Callable[[], Any] = lambda: None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Adapters and head, trained on rows; start: of tuned_inputs.starting_params.

    Raises:
      ValueError: the loss is not finite.
    """
    optimizer = TunedOptimizer(b2=0.999, weight_decay=tuning.weight_decay)
    step_config = StepConfig(precision=tuning.dtype, optimizer=optimizer, kernels="xla")
    model = tuned_reader.build(tuned, start, dtype=tuning.dtype)
    state = optimizer_step.init_state(model, start, step_config)
    run = functools.partial(optimizer_step.train_step, step_config=step_config, loss_fn=tuned_reader.loss_fn)
    step_fn, key = jax.jit(run, donate_argnums=0), prng.key_from_seed(tuning.seed)
    random, done = np.random.default_rng(tuning.seed), 0
    total = tuning.epochs * sum(1 for _ in batches(rows, tuning.batch_rows, None))
    for _ in range(tuning.epochs):
        for prompt, mine in batches(rows, tuning.batch_rows, random):
            now = tuning.learning_rate * min(1.0, (done + 1) / WARMUP) * (1.0 - done / total)
            state, metrics = step_fn(state, _batch(prompt, mine, labels, tuning), jnp.float32(now), key)
            done += 1
            progress()
    if not np.isfinite(float(metrics.loss)):
        raise ValueError(f"tuning: loss {float(metrics.loss)}; lower learning_rate={tuning.learning_rate}")
    found = optimizer_step.state_arrays(state)["params"]
    return {name: value for name, value in found.items() if optimizer.is_trained(name)}


def logits(
    tuned: TunedConfig, params: Mapping[str, np.ndarray], rows: Sequence[Place], labels: Sequence[np.ndarray],
    tuning: Tuning,
) -> dict[int, np.ndarray]:  # fmt: skip
    """Log-odds of the tokens of every response of some rows, by its number."""
    score = _program(tuned_reader.build(tuned, params, dtype=tuning.dtype), tuned_reader.predict)
    found = {}
    for prompt, mine in batches(rows, tuning.batch_rows, None):
        said = np.asarray(score(_batch(prompt, mine, labels, tuning)), np.float64)
        for row, each in zip(mine, said):
            for number, place in zip(row.members, layout.places([range(b - a) for a, b in row.slices])):
                found[number] = each[place]
    return found
