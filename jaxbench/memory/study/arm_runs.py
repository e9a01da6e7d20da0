"""Training and evaluation of the arms of arms.py, in JAX."""

from __future__ import annotations

import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Shaped

from jaxbench import cli, initial, parameters, store, train
from jaxbench.memory import decoder
from jaxbench.memory.study import arms, tasks, text_task
from jaxbench.memory.study.arms import AnyTask, Arms, Run
from jaxbench.memory.study.text_task import TextConfig
from jaxbench.training import observe, optimizer_step, precision, schedules
from jaxbench.training.schedules import ScheduleConfig
from jaxbench.training.step_config import OptimizerConfig, StepConfig

TOKENS_AT_ONCE = 16_384  # in one evaluation call
CURVE = 50  # points kept of a run's loss curve


def run_all(settings: Arms, workdir: str | Path, *, part: slice = slice(0, None, 1)) -> None:
    """Train and evaluate the runs of a part that the folder does not have yet; each appends a line to the part's file.

    Args:
      part: which of the runs, cli.part().

    Raises:
      ValueError: a text has too few bytes, or a line of the folder's files is not a run; then nothing is written.
    """
    workdir = Path(workdir)
    for task in settings.tasks.values():
        if isinstance(task, TextConfig):
            text_task.check(task, settings.factors)
    path, trials = workdir / f"runs-{part.start + 1}-of-{part.step}.jsonl", Trials(settings)
    mine, done = arms.runs(settings)[part], arms.known(settings, workdir)
    left = [run for run in mine if run not in done]
    display = observe.Display(len(mine), what="run")
    display.start(len(mine) - len(left))
    try:
        for num_done, run in enumerate(left, len(mine) - len(left) + 1):
            record = {"identity": arms.identity(settings, run)} | trials.take(run)
            store.append(path, [record])
            cli.keep(f"finished runs are in {path}; the same command goes on")
            display.update(num_done, "")
            display.say(f"{num_done}/{len(mine)} {_line(settings, run, record)}")
    finally:
        display.close()


def _line(settings: Arms, run: Run, record: dict[str, Any]) -> str:
    name, held_out = arms.measure(settings.tasks[run.task]).name, record["held_out"]
    return (
        f"{run.task} {run.arm} {run.learning_rate:g} seed {run.seed}: held-out {name} {held_out:.3f}, loss "
        f"{record['curve'][-1][1]:.3f}, {record['seconds']:.0f} s"
    )


class Trials:
    """The compiled programs of the arms, shared by their runs."""

    def __init__(self, settings: Arms):
        self.settings = settings
        self.step_config = StepConfig(
            clip_norm=settings.clip_norm, nonfinite="skip",
            optimizer=OptimizerConfig(weight_decay=settings.weight_decay),
        )  # fmt: skip
        self._step = jax.jit(
            functools.partial(optimizer_step.train_step, step_config=self.step_config), donate_argnums=0
        )
        self._score = jax.jit(functools.partial(_scores, step_config=self.step_config), static_argnames="is_text")

    def take(self, run: Run) -> dict[str, Any]:
        """Train one run, evaluate it at every length, and return its record without the identity."""
        s, task, steps = self.settings, self.settings.tasks[run.task], self.settings.steps_of(run.task)
        model = s.model(run.arm, task.vocab_size)
        params = initial.initial_params(model, run.seed, std=s.decoder.initial_std)
        policy = precision.POLICIES[self.step_config.precision]
        built = decoder.build(model, params, dtype=policy.compute)
        state = optimizer_step.init_state(built, params, self.step_config)
        schedule = ScheduleConfig(kind="cosine", warmup_steps=min(s.warmup_steps, steps), final_fraction=0.1)
        start, cpu, losses = time.perf_counter(), time.process_time(), []
        with ThreadPoolExecutor(1) as ahead:  # the next rows are made while the device works
            make = functools.partial(_rows, task, seed=run.seed, batch_size=s.batch_size)
            upcoming = ahead.submit(make, step=0)
            for step in range(steps):
                batch, upcoming = upcoming.result(), ahead.submit(make, step=step + 1)
                rate = schedules.learning_rate(schedule, step, peak=run.learning_rate, steps=steps)
                state, metrics = self._step(state, batch, jnp.float32(rate))
                losses.append(metrics.loss)
        curve = [float(loss) for loss in losses]
        every = max(1, steps // CURVE)
        record = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "skipped": int(metrics.skipped),
            "parameters": sum(value.size for value in params.values()),
            "curve": [[k + every, float(np.mean(curve[k : k + every]))] for k in range(0, len(curve), every)],
        }
        evaluate = functools.partial(self._evaluate, state)
        record["held_out"] = evaluate(task, seed=tasks.HELD_OUT)[arms.measure(task).mean]
        record["factors"] = {str(factor): evaluate(task.at_length(factor), seed=tasks.TEST) for factor in s.factors}
        return record

    def _evaluate(self, state: optimizer_step.TrainState, task: AnyTask, *, seed: int) -> dict[str, Any]:
        """Mean score on rows of a task, and the scores binned by distance."""
        s, measure = self.settings, arms.measure(task)
        at_once = max(1, min(s.test_rows, TOKENS_AT_ONCE // task.length))
        scores, distances = [], []
        for step in range(-(-s.test_rows // at_once)):
            rows = _batch(task, seed=seed, step=step, batch_size=at_once)
            # Only the scores leave the device: logits of the longest rows are a hundred times larger.
            score = self._score(
                state.params, jnp.asarray(rows.tokens), jnp.asarray(rows.targets), graph=state.graph,
                is_text=measure is arms.BITS,
            )  # fmt: skip
            is_asked = rows.targets != tasks.UNSCORED
            is_asked[s.test_rows - step * at_once :] = False  # the last call has the same shape as the others
            scores.append(np.asarray(score)[is_asked])
            distances.append(rows.distance[is_asked])
        scores, distances = np.concatenate(scores), np.concatenate(distances)
        cells = arms.counted(scores, distances, s.window, task.length, measure.total)
        return {measure.mean: float(np.mean(scores, dtype=np.float64)), "cells": cells}


def _batch(task: AnyTask, *, seed: int, step: int, batch_size: int) -> tasks.TaskBatch:
    make = text_task.batch if isinstance(task, TextConfig) else tasks.batch
    return make(task, seed=seed, step=step, batch_size=batch_size)


def _rows(task: AnyTask, *, seed: int, step: int, batch_size: int) -> train.Batch:
    """Rows of a step as a training batch, whose loss counts only answers."""
    rows = _batch(task, seed=seed, step=step, batch_size=batch_size)
    is_asked = rows.targets != tasks.UNSCORED
    positions = np.broadcast_to(np.arange(task.length, dtype=np.int32), rows.tokens.shape)
    return train.Batch(rows.tokens, np.where(is_asked, rows.targets, 0), positions, is_asked)


def _scores(
    params: Any,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    *,
    graph: Any,
    is_text: bool,
    step_config: StepConfig,
) -> Shaped[Array, "B T"]:
    """Score of each prediction: whether the argmax is the target, or with is_text the target's surprisal in bits."""
    narrow = optimizer_step.cast_to_compute(params, precision.POLICIES[step_config.precision])
    model = parameters.merge(graph, narrow)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    logits = model(tokens, positions).astype(jnp.float32)
    if not is_text:
        return jnp.argmax(logits, axis=-1) == targets
    picked = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked) / math.log(2.0)
