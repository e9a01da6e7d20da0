"""What a suite's cases run, in whichever tree of jaxbench the process imports.

A comparison of two commits runs this file as it is here over the library of each, so that both are asked for the same
work; what a library of before does not have becomes that case's error. A case loads what it needs, prepares its
compiled programs, and measures itself once a call; its samples are seconds and tokens, from which the caller computes
rates by one rule.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

KEY = 0x5EED5EED5EED5EED  # of watermarks


class Generation:
    """A batch of prompts continued greedily."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """The model and its generator."""
        from jaxbench import sample, transformer
        from jaxbench.pretrained import weights

        held = weights.load_checkpoint(self.model)
        built = transformer.build(held.config, held.params, dtype=self.case["dtype"])
        processors, self.states = (), None
        if scheme := self.case["watermark"]:
            from jaxbench.watermark import keys, logits_processor

            processors = (logits_processor.Watermark(scheme, vocab_size=held.config.vocab_size),)
            self.states = [processors[0].state([keys.Key(KEY)] * self.case["batch"])]
        temperature = 1.0 if self.states else 0.0  # a scheme that draws has nothing to draw from at 0
        sampling = sample.SamplingParams(temperature=temperature)
        self.generator = sample.Generator(built, eos_id=None, sampling=sampling, processors=processors)
        size = (self.case["batch"], self.case["prompt_tokens"])
        self.prompts = np.random.default_rng(0).integers(0, held.config.vocab_size, size).tolist()

    def prepare(self) -> dict[str, Any]:
        """Compiled programs."""
        case, extra = self.case, {} if self.states is None else {"processor_states": self.states}
        programs = self.generator.compile(case["batch"], case["prompt_tokens"], case["new_tokens"], **extra)
        return {"prefill": programs.prefill, "decode": programs.decode}

    def measure(self) -> dict[str, Any]:
        """One generation, a token after another, each read on the host before the next is asked for."""
        count, started = self.case["new_tokens"], time.perf_counter()
        extra = {} if self.states is None else {"processor_states": self.states}
        state = self.generator.prefill(self.prompts, max_new_tokens=count, seed=0, **extra)
        np.asarray(state.tokens)
        first = last = time.perf_counter()
        seconds = []
        for made in range(2, count + 1):
            state = self.generator.decode(state, made)
            np.asarray(state.tokens)
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return {
            "first_token_s": first - started, "end_to_end_s": last - started, "seconds": last - first,
            "tokens": (count - 1) * self.case["batch"], "token_s": seconds,
        }  # fmt: skip


class Training:
    """One AdamW step of the model's first layers."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Parameters, moments and a batch."""
        from jaxbench import initial, train, transformer
        from jaxbench.pretrained import weights
        from jaxbench.training import optimizer_step
        from jaxbench.training.step_config import StepConfig

        held, case = weights.load_checkpoint(self.model), self.case
        shape = held.config.model_copy(update={"num_layers": min(case["num_layers"], held.config.num_layers)})
        params = {name: held.params[name] for name in initial.parameter_shapes(shape)}
        settings = StepConfig(precision=case["dtype"])
        self.state = optimizer_step.init_state(transformer.build(shape, params, dtype=case["dtype"]), params, settings)
        step = functools.partial(optimizer_step.train_step, step_config=settings, learning_rate=1e-5)
        size = (case["batch"], case["seq_len"] + 1)
        rows = np.random.default_rng(0).integers(0, shape.vocab_size, size).astype(np.int32)
        places = np.tile(np.arange(case["seq_len"], dtype=np.int32), (case["batch"], 1))
        self.batch = train.Batch(rows[:, :-1], rows[:, 1:], places, np.ones(places.shape, bool))
        self.step = step

    def prepare(self) -> dict[str, Any]:
        """The compiled step."""
        import jax

        self.program = jax.jit(self.step, donate_argnums=0).lower(self.state, self.batch).compile()
        return {"step": self.program}

    def measure(self) -> dict[str, Any]:
        """One step; it ends when its loss is on the host and its state is computed."""
        import jax

        started = time.perf_counter()
        self.state, metrics = self.program(self.state, self.batch)
        float(metrics.loss)
        jax.block_until_ready(jax.tree.leaves(self.state))
        return {"seconds": time.perf_counter() - started, "tokens": self.case["batch"] * self.case["seq_len"]}


class Tokenizing:
    """The default text's beginning, as token ids."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Tokenizer and text."""
        from jaxbench.pretrained import assets, tokenizer

        self.words = tokenizer.load_tokenizer(self.model if Path(self.model or "").suffix == ".gguf" else None)
        text = assets.default_text()
        self.text = (text * (1 + self.case["characters"] // len(text)))[: self.case["characters"]]

    def prepare(self) -> dict[str, Any]:
        """Nothing is compiled."""
        return {}

    def measure(self) -> dict[str, Any]:
        """The whole text at once."""
        started = time.perf_counter()
        ids = self.words.encode(self.text, add_special=False)
        return {"seconds": time.perf_counter() - started, "tokens": len(ids)}


class Detection:
    """Scores and p-values of texts of random tokens."""

    VOCABULARY = 49152

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case = case

    def load(self) -> None:
        """Detector and texts."""
        from jaxbench.watermark import detect, detection, keys

        self.detector = detect.Detector(self.case["scheme"], vocab_size=self.VOCABULARY)
        self.detect, self.key = detection.detect, keys.Key(KEY)
        size = (self.case["batch"], self.case["tokens"])
        ids = np.random.default_rng(0).integers(0, self.VOCABULARY, size).astype(np.int32)
        self.ids = detection.as_ids(ids, None, vocab_size=self.VOCABULARY)

    def prepare(self) -> dict[str, Any]:
        """Compiled by the first call."""
        self.measure()
        return {}

    def measure(self) -> dict[str, Any]:
        """All texts at once."""
        started = time.perf_counter()
        found = self.detect(self.detector, self.ids, self.key, prompt_lengths=None, payload=None)
        np.asarray(found.p_value)
        return {"seconds": time.perf_counter() - started, "tokens": self.case["batch"] * self.case["tokens"]}


class Compression:
    """The default text's beginning, as vectors."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Compressor and text."""
        from jaxbench.compress.auto import AutoCompressor
        from jaxbench.pretrained import assets

        self.compressor = AutoCompressor.from_pretrained(f"rfcc-base-{self.case['ratio']}x", model=self.model)
        words = self.compressor.words
        self.text = words.decode(words.encode(assets.default_text(), add_special=False)[: self.case["tokens"]])

    def prepare(self) -> dict[str, Any]:
        """Compiled by the first call."""
        self.compressor.compress(self.text[:400])
        return {}

    def measure(self) -> dict[str, Any]:
        """The text at once, tokenising included."""
        started = time.perf_counter()
        made = self.compressor.compress(self.text)
        return {"seconds": time.perf_counter() - started, "tokens": made.original_length}


class Quality:
    """The model's loss on the default text's first windows."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Model and windows."""
        from jaxbench import transformer
        from jaxbench.pretrained import assets, tokenizer, weights

        held, (count, length) = weights.load_checkpoint(self.model), (self.case["windows"], self.case["seq_len"])
        self.built = transformer.build(held.config, held.params, dtype=self.case["dtype"])
        words, text = tokenizer.load_tokenizer(None), assets.default_text()
        ids = np.array(words.encode(text, add_special=False)[: count * (length + 1)], np.int32)
        self.rows = ids.reshape(count, length + 1) % held.config.vocab_size
        self.bytes = len(words.decode(ids.tolist()).encode())

    def prepare(self) -> dict[str, Any]:
        """The compiled forward pass."""
        import jax
        import jax.numpy as jnp

        def nats(model: Any, rows: Any) -> Any:
            places = jnp.broadcast_to(jnp.arange(rows.shape[1] - 1, dtype=jnp.int32), rows[:, 1:].shape)
            logits = model(rows[:, :-1], places).astype(jnp.float32)
            own = jnp.take_along_axis(logits, rows[:, 1:, None], axis=2)[:, :, 0]
            return jnp.sum(jax.nn.logsumexp(logits, axis=2) - own)

        self.program = jax.jit(nats).lower(self.built, self.rows).compile()
        return {"forward": self.program}

    def measure(self) -> dict[str, Any]:
        """Bits a byte, which are the same every time."""
        nats = float(self.program(self.built, self.rows))
        return {"bits_per_byte": nats / np.log(2) / self.bytes}


WORKLOADS = {
    "generation": Generation, "training": Training, "tokenizing": Tokenizing, "detection": Detection,
    "compression": Compression, "quality": Quality,
}  # fmt: skip
