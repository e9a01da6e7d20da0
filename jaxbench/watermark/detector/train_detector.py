"""Train the neural detector, calibrate it on held-out human text, and compare it with the exact test.

Marked texts come from the model (power.generate: no end token, one key per text), human text from the packaged prose or
--data, with its documents split in three: training, calibration, test. The test has other schemes and keys than the
training. neural_detection.py says what the detector's p-value guarantees.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, model_validator

from jaxbench import outputs, store
from jaxbench.config import Base, config_id
from jaxbench.generation import decoder, flax_decoder
from jaxbench.pretrained import tokenizer, weights
from jaxbench.text import packing, passages
from jaxbench.training import optimizer_step
from jaxbench.training.step_config import OptimizerConfig, StepConfig
from jaxbench.watermark import config, reference, significance
from jaxbench.watermark.detector import features, neural, training_data
from jaxbench.watermark.detector.neural_detection import Scorer, conformal_p, null_scores
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme
from jaxbench.watermark.study import detectability, power


class Training(Base):
    """Settings of training the neural detector: configs/watermark/neural.yaml."""

    train_schemes: dict[str, config.Scheme] = Field(min_length=1)
    test_schemes: dict[str, config.Scheme] = Field(min_length=1)
    detector: features.NeuralConfig = features.NeuralConfig()
    model: str = "default"  # generates the marked texts
    num_train_texts: int = Field(default=256, ge=1)  # of each training scheme
    num_test_texts: int = Field(default=128, ge=1)  # of each test scheme
    prompt_tokens: int = Field(default=32, ge=1)
    num_tokens: int = Field(default=200, ge=8)  # of every text
    generation_batch: int = Field(default=32, ge=1)
    steps: int = Field(default=1500, ge=1)
    batch_size: int = Field(default=128, ge=4)
    learning_rate: float = Field(default=2e-3, gt=0)  # constant
    weight_decay: float = Field(default=0.01, ge=0)
    min_tokens: int = Field(default=25, ge=1)  # shortest text shown in training
    max_edited: float = Field(default=0.4, ge=0, lt=1)  # largest share of replaced tokens in training
    pasted_share: float = Field(default=0.25, ge=0, le=1)  # share of training examples that are a passage in human text
    test_lengths: tuple[config.Count, ...] = Field(default=(25, 50, 100, 200), min_length=1)
    test_edits: tuple[config.Level, ...] = (0.1, 0.3)  # shares of replaced tokens, in texts of num_tokens
    test_pasted: tuple[config.Level, ...] = (0.5, 0.25)  # shares of marked tokens inside human text
    num_null: int = Field(default=4000, ge=100, le=10**6)  # null scores behind each conformal p-value
    levels: tuple[config.Level, ...] = Field(default=(1e-2, 1e-3), min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    passphrase: str = Field(default="neural", min_length=1)  # keys of training and test texts are derived from it

    @model_validator(mode="after")
    def _check(self) -> Training:
        for schemes in (self.train_schemes, self.test_schemes):
            power.check_names(schemes, "train-detector")
        for scheme in (*self.train_schemes.values(), *self.test_schemes.values()):
            config.check_generates(scheme, "train-detector", lists=False)
        if max(self.test_lengths) > self.num_tokens or self.min_tokens > self.num_tokens:
            raise ValueError(
                f"train-detector: test_lengths={list(self.test_lengths)} and min_tokens={self.min_tokens} must not be "
                f"above num_tokens={self.num_tokens}"
            )
        if min(self.levels) * (self.num_null + 1) < 1:
            raise ValueError(
                f"train-detector: no p-value reaches level {min(self.levels)} with num_null={self.num_null}; wanted at "
                f"least {math.ceil(1 / min(self.levels)) - 1} null scores"
            )
        return self


class Corpus(NamedTuple):
    """Human passages [N T] of the three splits."""

    train: np.ndarray
    calibration: np.ndarray
    test: np.ndarray


def split(human: passages.Passages) -> Corpus:
    """Split passages in three by document: half for training, a quarter each for calibration and test.

    Raises:
      ValueError: fewer than four documents.
    """
    documents = np.unique(human.documents)
    if len(documents) < 4:
        raise ValueError(
            f"train-detector: {len(documents)} documents of human text, wanted at least 4; pass more with --data"
        )
    part = {document: (0, 1, 0, 2)[i % 4] for i, document in enumerate(documents)}
    parts = np.array([part[document] for document in human.documents])
    return Corpus(*(human.tokens[parts == i] for i in range(3)))


def fit(
    settings: Training, marked: list[training_data.Pool], human: list[training_data.Pool],
    *, say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, np.ndarray], list[float]]:  # fmt: skip
    """Train, and return the parameters by name and the loss of every step, nats per text."""
    params = features.initial_params(settings.detector, settings.seed)
    model = neural.build(settings.detector, params)
    adamw = OptimizerConfig(b1=0.9, b2=0.99, eps=1e-8, weight_decay=settings.weight_decay, decay="all")
    step_config = StepConfig(clip_norm=None, optimizer=adamw)
    state = optimizer_step.init_state(model, params, step_config)
    step = functools.partial(
        optimizer_step.train_step, step_config=step_config, loss_fn=neural.loss_fn, is_guarded=False
    )
    step_fn = jax.jit(functools.partial(step, learning_rate=settings.learning_rate), donate_argnums=0)
    example = training_data.Example(settings.min_tokens, settings.max_edited, settings.pasted_share)
    random, losses = np.random.default_rng(settings.seed), []
    for step in range(settings.steps):
        arrays = training_data.batch(marked, human, size=settings.batch_size, example=example, random=random)
        state, metrics = step_fn(state, neural.Batch(*map(jnp.asarray, arrays)))
        losses.append(float(metrics.loss))
        if not np.isfinite(losses[-1]):
            raise ValueError(
                f"train-detector: loss {losses[-1]} at step {step}; lower learning_rate={settings.learning_rate}"
            )
        if (step + 1) % 100 == 0:
            say(f"step {step + 1} of {settings.steps}: loss {np.mean(losses[-100:]):.4f} nats per text")
    return optimizer_step.state_arrays(state)["params"], losses


def conditions(
    settings: Training, tokens: np.ndarray, human: np.ndarray, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and tokens of every test condition of marked texts [N T]."""
    random = np.random.default_rng((settings.seed, seed))
    for length in settings.test_lengths:
        yield f"{length} tokens", tokens[:, :length]
    for share in settings.test_edits:
        yield f"{share:.0%} replaced", training_data.replaced(tokens, share, human, random)
    for share in settings.test_pasted:
        yield f"{share:.0%} in human text", training_data.pasted(tokens, share, human, random)


def judge(
    settings: Training,
    scorer: Scorer,
    name: str,
    tokens: np.ndarray,
    keys: list[Key],
    human: Corpus,
    *,
    vocab_size: int,
) -> list[dict[str, Any]]:
    """Return rows of true-positive rates of one test scheme, of the neural detector and the exact test."""
    scheme, out, null = settings.test_schemes[name], [], {}
    calibration = training_data.human_pool(scheme, human.calibration, vocab_size=vocab_size)
    for condition, texts in conditions(settings, tokens, human.test, seed=len(name)):
        length = texts.shape[1]
        if length not in null:
            null[length] = null_scores(scorer, calibration, length=length, count=settings.num_null, seed=settings.seed)
        found, exact = evidence(scheme, texts, keys, vocab_size=vocab_size)
        p = conformal_p(scorer(found), null[length])
        for level in settings.levels:
            row = {"scheme": name, "condition": condition, "level": level}
            row["neural"] = detectability.detected(p, level)._asdict()
            row["exact"] = detectability.detected(exact, level)._asdict()
            out.append(row)
    random = np.random.default_rng((settings.seed, 99))
    pool = training_data.human_pool(scheme, human.test, vocab_size=vocab_size)
    rows = np.arange(settings.num_null) % len(human.test)
    length = max(settings.test_lengths)
    p = conformal_p(scorer(training_data.null_arrays(pool, rows, length, random)), null[length])
    for level in settings.levels:
        realised = detectability.detected(p, level)._asdict()
        out.append({"scheme": name, "condition": "human text, held out", "level": level, "neural": realised})
    return out


def evidence(
    scheme: Scheme, tokens: np.ndarray, keys: list[Key], *, vocab_size: int
) -> tuple[features.Arrays, np.ndarray]:
    """Return the detector's inputs for texts [N T] with one key each, and the exact test's p-values [N]."""
    found = reference.evidence(scheme, keys, tokens, vocab_size=vocab_size)
    value = features.evidence(scheme, found).astype(np.float32)
    arrays = features.Arrays(tokens, value, found.scored, np.zeros(len(tokens), np.float32))
    return arrays, significance.score(scheme, found, vocab_size=vocab_size).p_value


def run(
    settings: Training,
    *,
    path: str | Path | None = None,
    workdir: str | Path,
    options: decoder.Options = decoder.Options("xla"),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Generate, train, save and test; write detector.safetensors, detector.json and neural.json into workdir.

    Human texts, which also supply the prompts, come from `path` (passages.read_texts); None = the packaged default.

    Raises:
      ValueError: a training scheme is also a test scheme, there are too few human documents, or workdir holds the texts
        of another configuration or of other kernels.
    """
    workdir, begun = Path(workdir), time.process_time()
    shared = [name for name, scheme in settings.test_schemes.items() if scheme in settings.train_schemes.values()]
    if shared:
        raise ValueError(f"train-detector: test schemes {shared} are also trained on; their keys alone would differ")
    encoder = tokenizer.load_tokenizer(settings.model)
    texts = passages.read_texts(path)
    human = split(passages.cut(encoder, texts, num_tokens=settings.num_tokens, max_passages=100_000))
    shape = weights.read_config(settings.model)
    vocab_size, model_sha256 = shape.vocab_size, weights.checksum(settings.model)
    extra = {"text_sha256": packing.text_sha256(path), "model_sha256": model_sha256, "vocab_size": vocab_size}
    power.check_length(settings.prompt_tokens + settings.num_tokens, shape.max_seq_len)
    plans = {part: _generation(settings, part) for part in ("train", "test")}
    choice = power.choose(plans["train"], options, shape, say=say, rows="train-detector: generation_batch")
    model, made = flax_decoder.load(settings.model, choice).model, {}
    for part, plan in plans.items():
        given = power.prompts(plan, encoder, path)
        store.claim(workdir / part / "chunks", power.batches_id(plan, choice, extra))
        for name in plan.schemes:
            tokens = power.generate(plan, name, given, model=model, workdir=workdir / part, say=say)
            made[part, name] = tokens, power.text_keys(plan, name, len(tokens))
    marked, plain = [], []
    for name, scheme in settings.train_schemes.items():
        marked.append(training_data.marked_pool(scheme, *made["train", name], vocab_size=vocab_size))
        plain.append(training_data.human_pool(scheme, human.train, vocab_size=vocab_size))
    params, losses = fit(settings, marked, plain, say=say)
    own_id = config_id(settings, extra=extra) + choice.suffix()
    record = {"training": settings.model_dump(mode="json"), "config_id": own_id, "kernels": choice.identity(), **extra}
    features.save(workdir, settings.detector, params, record, human.calibration)
    scorer, rows = Scorer(settings.detector, params), []
    for name in settings.test_schemes:
        rows += judge(settings, scorer, name, *made["test", name], human, vocab_size=vocab_size)
    result = {**record, "cpu_s": round(time.process_time() - begun, 1), "losses": losses, "rows": rows}
    outputs.write_json(workdir / "neural.json", result)
    for row in rows:
        say(line(row))
    return result


def line(row: Mapping[str, Any]) -> str:
    """Format one row as text."""
    shown = [f"{name} {_rate(row[name])}" for name in ("neural", "exact") if name in row]
    return f"{row['scheme']:<20} {row['condition']:<22} FPR {row['level']:<6g} " + "  ".join(shown)


def _rate(value: Mapping[str, float]) -> str:
    return f"{value['value']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"


def _generation(settings: Training, part: str) -> power.Power:
    """Return the settings that generate the marked texts of a part, train or test."""
    schemes, count = settings.train_schemes, settings.num_train_texts
    if part == "test":
        schemes, count = settings.test_schemes, settings.num_test_texts
    return power.Power(
        schemes=schemes, model=settings.model, num_texts=count, prompt_tokens=settings.prompt_tokens,
        lengths=(settings.num_tokens,), batch_size=settings.generation_batch, seed=settings.seed + (part == "test"),
        passphrase=f"{settings.passphrase} {part}",
    )  # fmt: skip
