"""Train the token classifier on labelled responses, and score others with it.

A trained classifier is numpy arrays, so that code which stores it does not depend on what trained it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Shaped

from jaxbench import prng
from jaxbench.hallucination import detector, linear, token_classifier, token_inputs, token_scoring
from jaxbench.hallucination.detector import Detector, Heard, Inputs, Labels
from jaxbench.hallucination.token_inputs import Nested, Tokens, Trained, Training
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import OptimizerConfig, StepConfig

WARMUP = 20  # steps
CLIP_NORM = 1.0
INNER_FOLDS = 3


def fit_detector(
    inputs: Inputs, labels: Labels, settings: Training = Training(), *, tuned: Heard | None = None
) -> Detector:
    """Fit the detector to labelled responses, with a token classifier and, if one is given, a tuned reader.

    Raises:
      ValueError: as fit, and as detector.fit.
    """
    tokens = nested(inputs.tokens, labels.tokens, labels.source, settings)
    return detector.fit(inputs, labels, tokens=tokens, tuned=tuned)


def nested(
    tokens: Sequence[Tokens],
    labels: Sequence[Bool[np.ndarray, " T"]],
    source: Shaped[np.ndarray, " R"],
    settings: Training,
    *,
    inner_folds: int = INNER_FOLDS,
    seed: int = 0,
) -> Nested:
    """Train classifiers on all responses, and score each response by others trained without its source.

    Raises:
      ValueError: as fit, or all labelled or all unlabelled tokens are in one fold of sources.
    """
    fold, said = linear.folds(source, inner_folds, seed=seed), [np.zeros(0)] * len(tokens)
    counts = [len(each) for each in labels]
    linear.check_folds(np.concatenate(labels), np.repeat(source, counts), np.repeat(fold, counts))
    for i in range(inner_folds):
        train, test = np.flatnonzero(fold != i), np.flatnonzero(fold == i)
        trained = _ensemble([tokens[j] for j in train], [labels[j] for j in train], settings)
        for j, each in zip(test, token_scoring.logits(trained, [tokens[j] for j in test])):
            said[j] = each
    return Nested(_ensemble(tokens, labels, settings), said, token_scoring.threshold(tokens, labels, said))


def _ensemble(tokens: Sequence[Tokens], labels: Sequence[np.ndarray], settings: Training) -> tuple[Trained, ...]:
    columns = [each.columns for each in tokens]
    each = (settings.model_copy(update={"seed": settings.seed + i}) for i in range(settings.num_seeds))
    return tuple(fit(columns, labels, one) for one in each)


def fit(
    tokens: Sequence[Float[np.ndarray, "T C"]], labels: Sequence[Bool[np.ndarray, " T"]], settings: Training
) -> Trained:
    """Train a classifier of responses' tokens by AdamW, with a learning rate that falls to 0.

    Raises:
      ValueError: one class only; a column, a loss or a gradient that is not finite.
    """
    size = min(settings.batch_size, len(tokens))
    rate = np.concatenate(labels).mean()
    if not 0 < rate < 1:
        raise ValueError(f"token classifier: {rate:.0%} of the tokens are labelled; wanted both classes")
    scale = token_inputs.scale_of(tokens)
    config = token_inputs.TokenConfig(num_columns=len(scale.mean), **settings.shape())
    params = token_inputs.initial_params(config, settings.seed, rate=rate)
    adamw = OptimizerConfig(b1=0.9, b2=0.999, weight_decay=settings.weight_decay, decay="matrices")
    step_config = StepConfig(clip_norm=CLIP_NORM, optimizer=adamw)
    state = optimizer_step.init_state(token_classifier.build(config, params), params, step_config)
    step_fn, key = _step(step_config), prng.key_from_seed(settings.seed)
    wide = token_classifier.single(scale)
    lengths, random, done = np.array([len(each) for each in tokens]), np.random.default_rng(settings.seed), 0
    total = settings.epochs * (len(tokens) // size)
    for _ in range(settings.epochs):
        for rows in token_inputs.batches(lengths, size=size, random=random):
            arrays = token_inputs.padded([tokens[i] for i in rows], [labels[i] for i in rows], num_rows=size)
            now = settings.learning_rate * min(1.0, (done + 1) / WARMUP) * (1.0 - done / total)
            state, metrics = step_fn(state, token_classifier.Batch(*arrays), wide, jnp.float32(now), key)
            done += 1
    if missed := int(metrics.skipped):  # from the first non-finite step on, every step is skipped
        raise ValueError(
            f"token classifier: the loss or its gradient is not finite in step {done - missed + 1} of {done}; lower "
            f"learning_rate={settings.learning_rate}"
        )
    return Trained(config, optimizer_step.state_arrays(state)["params"], scale)


@functools.cache
def _step(step_config: StepConfig):
    """Return the compiled step, one for all fits of a process: folds share it."""
    step = functools.partial(optimizer_step.train_step, step_config=step_config, loss_fn=token_classifier.loss_fn)

    def run(state, batch, scale, rate, key):
        batch = batch._replace(columns=token_classifier.standardised(batch.columns, scale))
        return step(state, batch, rate, key)

    return jax.jit(run, donate_argnums=0)
