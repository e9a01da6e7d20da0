"""Tune a reader's upper blocks to labelled tokens: train adapters and head on stored outputs of the blocks below.

A group's file holds the tuned blocks' keys and values of the prompt, and the residual stream before these blocks of all
its responses (tuned_reading.py), so that an epoch runs only the tuned blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from safetensors.numpy import load_file

from jaxbench import config, outputs, prng
from jaxbench.hallucination import layout, tuned_inputs, tuned_reader
from jaxbench.hallucination.tuned_inputs import PROMPT_SIZES, Arrays, Row, TunedConfig, TunedOptimizer
from jaxbench.hallucination.tuned_reading import Read
from jaxbench.lora.config import ATTENTION, FEED_FORWARD, LoraConfig
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import StepConfig

WARMUP = 20  # steps


class Tuning(config.Base):
    """How a reader is tuned."""

    first: int | None = pydantic.Field(default=None, ge=0)  # the first tuned block; None = two thirds of the way
    num_blocks: int = pydantic.Field(default=4, ge=1)
    lora: LoraConfig = LoraConfig(rank=16, alpha=32.0, targets=(*ATTENTION, *FEED_FORWARD))
    epochs: int = pydantic.Field(default=2, ge=1)
    batch_rows: int = pydantic.Field(default=2, ge=1)  # rows of row_tokens
    row_tokens: int = pydantic.Field(default=512, ge=1)  # responses to one prompt share a row
    learning_rate: float = pydantic.Field(default=5e-4, gt=0)  # peak; falls linearly to 0
    weight_decay: float = pydantic.Field(default=0.01, ge=0)
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of products

    def tuned(self, decoder: config.TransformerConfig) -> TunedConfig:
        """Shape of the tuned reader of a decoder.

        Raises:
          ValueError: the decoder has no such blocks.
        """
        first = 2 * decoder.num_layers // 3 if self.first is None else self.first
        count = min(self.num_blocks, decoder.num_layers - first) if self.first is None else self.num_blocks
        return TunedConfig(decoder=decoder, lora=self.lora, first=first, num_blocks=count)


class Place(NamedTuple):
    """Where a row of responses is stored."""

    path: Path  # of the group's file
    part: int  # index of the part in that file
    prompt: int  # tokens of the prompt
    members: tuple[int, ...]  # indices of its responses in the data
    rows: tuple[int, ...]  # and in the part
    lengths: tuple[int, ...]  # tokens of each


def write(path: Path, read: Sequence[tuple[tuple[int, ...], Read]], tuning: Tuning) -> None:
    """Write what LowerReading.read returned for a group, atomically; bfloat16 as the bits of uint16."""
    arrays = {}
    for part, (numbers, each) in enumerate(read):
        bits = {
            name: np.asarray(value, jnp.bfloat16).view(np.uint16) if tuning.dtype == "bfloat16" else value
            for name, value in each._asdict().items() if name != "lengths"
        }  # fmt: skip
        bits |= {"lengths": each.lengths, "numbers": np.array(numbers, np.int32)}
        arrays |= {f"{part}.{name}": np.ascontiguousarray(value) for name, value in bits.items()}
    outputs.save_tensors(path, arrays)


def load(path: Path) -> list[tuple[tuple[int, ...], Read]]:
    """Read what `write` wrote.

    Raises:
      ValueError: the file is damaged.
    """
    try:
        held = load_file(path)
    except Exception as error:  # safetensors raises its own type and OSError
        raise ValueError(f"{path}: cannot be read ({error}); remove it, and it is made again") from error
    found = []
    for part in range(1 + max(int(name.split(".")[0]) for name in held)):
        fields = {name.split(".")[1]: value for name, value in held.items() if name.startswith(f"{part}.")}
        numbers = tuple(fields.pop("numbers").tolist())
        wide = {name: x.view(jnp.bfloat16) if x.dtype == np.uint16 else x for name, x in fields.items()}
        found.append((numbers, Read(**wide)))
    return found


def places(path: Path, members: Sequence[int], tuning: Tuning) -> list[Place]:
    """Pack a group's responses into rows; members: their indices in the data, in the group's order."""
    found = []
    for part, (numbers, read) in enumerate(load(path)):
        prompt = read.keys.shape[-1]
        for row in layout.pack(read.lengths.tolist(), tuning.row_tokens, max_responses=tuned_inputs.MAX_RESPONSES):
            lengths = tuple(int(read.lengths[i]) for i in row)
            found.append(Place(path, part, prompt, tuple(members[numbers[i]] for i in row), tuple(row), lengths))
    return found


def _row(place: Place, labels: Sequence[np.ndarray] | None) -> Row:
    """Load a row with the labels of its responses' tokens; labels: of all responses, None = nothing is labelled."""
    read = load(place.path)[place.part][1]
    return read.row(place.rows, None if labels is None else [labels[i] for i in place.members])


def batches(rows: Sequence[Place], size: int, random: np.random.Generator | None) -> Iterator[tuple[int, list[Place]]]:
    """Yield batches of at most `size` rows and the size that their prompts are padded to; shuffled, or in order."""
    by_size: dict[int, list[Place]] = {}
    for row in rows:
        by_size.setdefault(layout.bucket(row.prompt, PROMPT_SIZES), []).append(row)
    made = []
    for prompt, mine in sorted(by_size.items()):
        order = np.arange(len(mine)) if random is None else random.permutation(len(mine))
        made += [(prompt, [mine[i] for i in order[at : at + size]]) for at in range(0, len(mine), size)]
    yield from made if random is None else (made[i] for i in random.permutation(len(made)))


def _batch(prompt: int, rows: Sequence[Place], labels: Sequence[np.ndarray] | None, tuning: Tuning) -> Arrays:
    """Load a batch, filled up to batch_rows with rows that have no token."""
    loaded = [_row(row, labels) for row in rows]
    longest = max(sum(row.lengths) for row in loaded)
    made = tuned_inputs.padded(loaded, prompt_size=prompt, size=max(tuning.row_tokens, longest))
    missing = tuning.batch_rows - len(rows)
    padding = [np.zeros((missing, *each.shape[1:]), each.dtype) for each in made]
    return Arrays(*(np.concatenate(pair) for pair in zip(made, padding)))


def num_steps(rows: Sequence[Place], tuning: Tuning) -> int:
    """Number of steps that `fit` takes on rows."""
    return tuning.epochs * sum(1 for _ in batches(rows, tuning.batch_rows, None))


def fit(
    tuned: TunedConfig, start: Mapping[str, np.ndarray], rows: Sequence[Place], labels: Sequence[np.ndarray],
    tuning: Tuning, *, progress: Callable[[], Any] = lambda: None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Train adapters and head on rows, and return them; start: from tuned_inputs.starting_params.

    Raises:
      ValueError: a step's loss or gradient is not finite.
    """
    optimizer = TunedOptimizer(b2=0.999, weight_decay=tuning.weight_decay)
    step_config = StepConfig(precision=tuning.dtype, optimizer=optimizer, kernels="xla")
    model = tuned_reader.build(tuned, start, dtype=tuning.dtype)
    state = optimizer_step.init_state(model, start, step_config)
    run = functools.partial(optimizer_step.train_step, step_config=step_config, loss_fn=tuned_reader.loss_fn)
    step_fn, key = jax.jit(run, donate_argnums=0), prng.key_from_seed(tuning.seed)
    random, done = np.random.default_rng(tuning.seed), 0
    total = num_steps(rows, tuning)
    for _ in range(tuning.epochs):
        for prompt, mine in batches(rows, tuning.batch_rows, random):
            now = tuning.learning_rate * min(1.0, (done + 1) / WARMUP) * (1.0 - done / total)
            batch = tuned_reader.Batch(*_batch(prompt, mine, labels, tuning))
            state, metrics = step_fn(state, batch, jnp.float32(now), key)
            done += 1
            progress()
    if missed := int(metrics.skipped):  # from the first non-finite step on, every step is skipped
        raise ValueError(
            f"tuning: the loss or its gradient is not finite in step {done - missed + 1} of {done}; lower "
            f"learning_rate={tuning.learning_rate}"
        )
    found = optimizer_step.state_arrays(state)["params"]
    return {name: value for name, value in found.items() if optimizer.is_trained(name)}


def logits(
    tuned: TunedConfig, params: Mapping[str, np.ndarray], rows: Sequence[Place], tuning: Tuning
) -> dict[int, np.ndarray]:
    """Token log-odds of every response of some rows, by its index in the data."""
    score = tuned_reader.scorer(tuned_reader.build(tuned, params, dtype=tuning.dtype))
    found = {}
    for prompt, mine in batches(rows, tuning.batch_rows, None):
        for row, each in zip(mine, score(_batch(prompt, mine, None, tuning))):
            for number, place in zip(row.members, layout.places([range(length) for length in row.lengths])):
                found[number] = each[place]
    return found
