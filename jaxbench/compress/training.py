"""Train a compressor on documents: resumable, with loss and held-out figures in a file of records.

The decoder is frozen, except for adapters if the configuration has any. A killed run resumes from its last checkpoint
with the rows that it would have had (rows.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench import config, prng, store
from jaxbench.compress import artifact, compressor, material
from jaxbench.compress.config import Arrays, CompressorConfig, is_trained, starting_params, with_prefix
from jaxbench.compress.judge import Judge
from jaxbench.compress.material import Material
from jaxbench.compress.teacher import Teacher
from jaxbench.compress.train_config import TrainingConfig
from jaxbench.pretrained import weights
from jaxbench.training import optimizer_step, schedules
from jaxbench.training.checkpoint import Checkpoints
from jaxbench.training.observe import Records
from jaxbench.training.step_config import StepConfig

WRITE_S = 120.0  # between writes of the weights, which take seconds
RECORDS, CHECKPOINTS, WEIGHTS = "records.jsonl", "checkpoints", "compressor.safetensors"


def train(
    settings: TrainingConfig,
    held: weights.Checkpoint,
    materials: Sequence[Material],
    held_out: Sequence[Material],
    workdir: Path,
    *,
    say: Callable[[str], Any] = print,
    progress: Callable[[int], Any] = lambda steps: None,
) -> dict[str, np.ndarray]:
    """Train for all steps and return parameters by name; resume from the newest checkpoint under workdir.

    Raises:
      ValueError: the folder is another run's or has more steps, another process trains there, a text is too short, or
        parameters are not finite.
    """
    with store.alone(workdir / WEIGHTS):
        return _train(settings, held, materials, held_out, workdir, say, progress)


def _train(
    settings: TrainingConfig,
    held: weights.Checkpoint,
    materials: Sequence[Material],
    held_out: Sequence[Material],
    workdir: Path,
    say: Callable[[str], Any],
    progress: Callable[[int], Any],
) -> dict[str, np.ndarray]:
    """Train as the only process that writes to workdir."""
    shape = settings.shape(held.config)
    earlier = _earlier(settings, shape, held)
    store.claim(workdir, _identity(settings, held, (*materials, *held_out), earlier))
    params = starting_params(shape, held.params, seed=settings.seed) | _own(earlier, shape, held, settings.seed)
    model = compressor.build(shape, params, dtype=settings.precision)
    step_config = settings.step_config()
    state = optimizer_step.init_state(model, params, step_config)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2, say=say)
    # A run that ends early leaves somewhat older weights.
    leave = functools.partial(
        artifact.save, workdir / WEIGHTS, shape, checkpoint=held, bits=artifact.FINE_BITS, local=True
    )  # fmt: skip
    try:
        found = checkpoints.restore(_kept(state), check_meta=lambda meta: None)
        done = 0 if found is None else _done(found.step, settings, workdir)
        records = Records(workdir / RECORDS)
        records.keep_until(done)  # drops what a killed run wrote after its last checkpoint
        state = state if found is None else _loaded(state, found.arrays)
        step_fn, key = _step_fn(step_config), prng.key_from_seed(settings.seed)
        judge, taught = Judge(settings, shape, state.graph, held_out), _teacher(settings, held)
        progress(done)
        started, written = time.monotonic(), -math.inf
        for step in range(done, settings.steps):
            rate = schedules.learning_rate(settings.schedule, step, peak=settings.learning_rate, steps=settings.steps)
            ratio, arrays = material.draw(materials, seed=settings.seed, step=step)
            state, metrics = step_fn(state, compressor.Batch(*taught(arrays)), jnp.float32(rate), key)
            record = {"step": step + 1, "ratio": ratio, "loss": float(metrics.loss), "seconds": _since(started)}
            records.add([record | {"grad_norm": float(metrics.grad_norm)}])
            progress(1)
            if (step + 1) % settings.held_out_every == 0 or step + 1 == settings.steps:
                figures = judge(state.params)
                records.add([{"step": step + 1, "held_out": figures, "seconds": _since(started)}])
                say(f"step {step + 1}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
                checkpoints.save(step + 1, _kept(state), {}, loss=_loss(figures))
                if step + 1 == settings.steps or time.monotonic() - written > WRITE_S:
                    leave(_trained(state, settings), about=_about(step + 1, figures, earlier))
                    written = time.monotonic()
        checkpoints.wait()
    finally:
        checkpoints.close()
    trained = _trained(state, settings)
    if not _is_written(workdir / WEIGHTS, settings.steps):  # killed after its last checkpoint, before its weights
        leave(trained, about=_about(settings.steps, _last_held_out(records), earlier))
    return trained


def _identity(
    settings: TrainingConfig, held: weights.Checkpoint, texts: Sequence[Material], earlier: artifact.Trained | None
) -> str:
    """Identity of runs that may resume from each other's checkpoints; more steps do not change it."""
    same = f"{config.config_id(settings, exclude=('steps',))}-{held.sha256[:12]}-{''.join(each.sum for each in texts)}"
    return same if earlier is None else f"{same}-{earlier.id}"


def _done(step: int, settings: TrainingConfig, workdir: Path) -> int:
    """Steps of the newest checkpoint.

    Raises:
      ValueError: they are more than the settings have: its weights would be labelled with fewer.
    """
    if step > settings.steps:
        raise ValueError(f"train: {workdir} has {step} steps, and steps={settings.steps}; wanted {step} or more, or "
                         "another --workdir")  # fmt: skip
    return step


def _step_fn(step_config: StepConfig) -> Callable[..., Any]:
    """The compiled step, which donates its state."""
    run = functools.partial(optimizer_step.train_step, step_config=step_config, loss_fn=compressor.loss_fn)
    return jax.jit(run, donate_argnums=0)


def _loss(figures: Mapping[str, float]) -> float:
    """The held-out loss by which checkpoints are compared: the first."""
    return next(value for name, value in figures.items() if name.endswith("_loss"))


def _last_held_out(records: Records) -> dict[str, float]:
    """The newest held-out figures of a run; empty if it has none yet."""
    return next((each["held_out"] for each in reversed(records.read()) if "held_out" in each), {})


def _trained(state: optimizer_step.TrainState, settings: TrainingConfig) -> dict[str, np.ndarray]:
    """Trained parameters by name.

    Raises:
      ValueError: they are not finite.
    """
    trained = {name: np.asarray(value) for name, value in state.params.items() if is_trained(name)}
    if not all(np.isfinite(value).all() for value in trained.values()):
        raise ValueError(f"train: parameters are not finite; lower learning_rate={settings.learning_rate}")
    return trained


def _about(step: int, figures: Mapping[str, float], earlier: artifact.Trained | None) -> dict[str, Any]:
    """Metadata of a weights file about its training."""
    about = {"steps": step, "held_out": dict(figures)}
    return about if earlier is None else about | {"start": {**earlier.about, "id": earlier.id}}


def _is_written(path: Path, steps: int) -> bool:
    """True if the weights after this many steps are written."""
    return path.exists() and artifact.describe(path)["about"]["steps"] == steps


def _own(
    earlier: artifact.Trained | None, shape: CompressorConfig, held: weights.Checkpoint, seed: int
) -> dict[str, np.ndarray]:
    """Parameters of an earlier run, with tags as long as this run's."""
    if earlier is None:
        return {}
    tags = earlier.params["tags.embedding"]
    if earlier.config.prefix != shape.prefix:
        tags = with_prefix(tags, shape, held.params, seed=seed)
    return {**earlier.params, "tags.embedding": tags}


def _teacher(settings: TrainingConfig, held: weights.Checkpoint) -> Callable[[Arrays], Arrays]:
    """Return a function that adds a teacher's tokens to continuations, if the settings have a teacher."""
    if not settings.distilled:
        return lambda arrays: arrays
    teacher = Teacher(held, settings.distilled, precision=settings.precision, prefix=settings.prefix)
    # rows of questions get none: one program per kind of rows, as without a teacher
    return lambda arrays: teacher(arrays) if (arrays.sampled >= 0).any() else arrays


def _earlier(settings: TrainingConfig, shape: CompressorConfig, held: weights.Checkpoint) -> artifact.Trained | None:
    """Load what an earlier run trained, if the settings name one."""
    if settings.start is None:
        return None
    found = artifact.load(settings.start, held)
    if found.config.lora not in (None, shape.lora):
        raise ValueError(
            f"train: start={settings.start} has adapters {found.config.lora}; wanted {shape.lora}, as here"
        )
    if found.config.prefix not in (1, shape.prefix):
        raise ValueError(
            f"train: start={settings.start} has a prefix of {found.config.prefix} vectors; wanted 1 or {shape.prefix}"
        )
    own = {"lora": shape.lora, "chunk": shape.chunk, "prefix": shape.prefix}
    if found.config.model_copy(update=own) != shape:
        differing = {
            name: getattr(found.config, name)
            for name in ("num_layers", "ratios", "d_connector", "d_local")
            if getattr(found.config, name) != getattr(shape, name)
        }
        raise ValueError(f"train: start={settings.start} has {differing}; wanted the shape of this run")
    return found


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)


# Checkpoints: trained parameters, their moments and counters


def _kept(state: optimizer_step.TrainState) -> dict[str, Any]:
    arrays = {f"params/{name}": value for name, value in state.params.items() if is_trained(name)}
    return arrays | {f"rest/{i}": value for i, value in enumerate(_rest(state))}


def _rest(state: optimizer_step.TrainState) -> list[Any]:
    counters = (state.step, state.scale, state.good_steps, state.skipped, state.is_halted)
    return [*jax.tree.leaves(state.moments), *counters]


def _loaded(state: optimizer_step.TrainState, arrays: Mapping[str, np.ndarray]) -> optimizer_step.TrainState:
    params = state.params | {
        name.removeprefix("params/"): jnp.array(value) for name, value in arrays.items() if name.startswith("params/")
    }
    rest = [jnp.array(arrays[f"rest/{i}"]) for i in range(len(_rest(state)))]  # copies: the step donates its state
    moments = jax.tree.unflatten(jax.tree.structure(state.moments), rest[:-5])
    counters = dict(zip(("step", "scale", "good_steps", "skipped", "is_halted"), rest[-5:]))
    return dataclasses.replace(state, params=params, moments=moments, **counters)
