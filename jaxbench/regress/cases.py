"""Cases of a suite, run on whichever jaxbench tree the process imports.

A comparison of two commits runs this commit's version of this file over the library of each, so that both do the same
work; what an older library lacks becomes that case's error. A case loads what it needs, prepares its compiled programs
and takes one measurement per call. Samples are seconds and tokens, from which the caller computes all rates by one
rule. Kinds that need a workload's own library are in workload_cases.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

KEY = 0x5EED5EED5EED5EED  # of watermarks


class Generation:
    """Greedy generation from a batch of prompts."""

    states: list[Any] | None = None  # of the watermark

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Load the model and build its generator."""
        from jaxbench import sample, transformer
        from jaxbench.pretrained import weights

        held = weights.load_checkpoint(self.model)
        built = transformer.build(held.config, held.params, dtype=self.case["dtype"])
        processors = ()
        if scheme := self.case["watermark"]:
            from jaxbench.watermark import keys, logits_processor

            processors = (logits_processor.Watermark(scheme, vocab_size=held.config.vocab_size),)
            self.states = [processors[0].state([keys.Key(KEY)] * self.case["batch"])]
        temperature = 1.0 if self.states else 0.0  # watermark schemes that sample cannot work at temperature 0
        sampling = sample.SamplingParams(temperature=temperature)
        self.generator = sample.Generator(built, eos_id=None, sampling=sampling, processors=processors)
        self.prompts = self._prompts(held.config.vocab_size)

    def _prompts(self, vocab_size: int) -> list[list[int]]:
        size = (self.case["batch"], self.case["prompt_tokens"])
        return np.random.default_rng(0).integers(0, vocab_size, size).tolist()

    def prepare(self) -> dict[str, Any]:
        """Compile the programs."""
        case, extra = self.case, {} if self.states is None else {"processor_states": self.states}
        programs = self.generator.compile(case["batch"], case["prompt_tokens"], case["new_tokens"], **extra)
        return {"prefill": programs.prefill, "decode": programs.decode}

    def measure(self) -> dict[str, Any]:
        """Generate once, token by token; each is read on the host before the next is requested."""
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


class Native(Generation):
    """The same with the native kernels, in one weight format."""

    def load(self) -> None:
        """Load the packed model and build its generator.

        Raises:
          NotAvailable: the kernels are not available here.
        """
        import jax

        from jaxbench import sample, transformer
        from jaxbench.generation import decoder
        from jaxbench.native import model as native
        from jaxbench.pretrained import weights

        wanted = decoder.Options("native", self.case["weights"], activations=self.case["activations"])
        choice = decoder.choose(wanted, jax.default_backend(), config=lambda: weights.read_config(self.model))
        built = decoder.load(self.model, choice, decoder.Backend(transformer, sample, native)).model
        self.generator = sample.Generator(built, eos_id=None, sampling=sample.SamplingParams(temperature=0.0))
        self.prompts = self._prompts(built.vocab_size)


class Training:
    """One AdamW step of the model's first layers."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Build parameters, moments and a batch."""
        from jaxbench import initial, transformer
        from jaxbench.pretrained import weights

        held = weights.load_checkpoint(self.model)
        shape = self._first_layers(held.config)
        params = {name: held.params[name] for name in initial.parameter_shapes(shape)}
        self._start(transformer.build(shape, params, dtype=self.case["dtype"]), params, shape.vocab_size)

    def _first_layers(self, config: Any) -> Any:
        return config.model_copy(update={"num_layers": min(self.case["num_layers"], config.num_layers)})

    def _start(self, built: Any, params: Mapping[str, np.ndarray], vocab_size: int) -> None:
        """Build moments, the step and its batch."""
        from jaxbench import train
        from jaxbench.training import optimizer_step
        from jaxbench.training.step_config import StepConfig

        case, settings = self.case, StepConfig(precision=self.case["dtype"])
        self.state = optimizer_step.init_state(built, params, settings)
        step = functools.partial(optimizer_step.train_step, step_config=settings, learning_rate=1e-5)
        size = (case["batch"], case["seq_len"] + 1)
        rows = np.random.default_rng(0).integers(0, vocab_size, size).astype(np.int32)
        places = np.tile(np.arange(case["seq_len"], dtype=np.int32), (case["batch"], 1))
        self.batch = train.Batch(rows[:, :-1], rows[:, 1:], places, np.ones(places.shape, bool))
        self.step = step

    def prepare(self) -> dict[str, Any]:
        """Compile the step."""
        import jax

        self.program = jax.jit(self.step, donate_argnums=0).lower(self.state, self.batch).compile()
        return {"step": self.program}

    def measure(self) -> dict[str, Any]:
        """Run one step; it ends when its loss is on the host and its state is computed."""
        import jax

        started = time.perf_counter()
        self.state, metrics = self.program(self.state, self.batch)
        float(metrics.loss)
        jax.block_until_ready(jax.tree.leaves(self.state))
        return {"seconds": time.perf_counter() - started, "tokens": self.case["batch"] * self.case["seq_len"]}


class Memory(Training):
    """The same with a neural memory in every layer, all of it from random values."""

    VOCABULARY = 4096  # small, so that the memory dominates the step, not the vocabulary projection

    def load(self) -> None:
        """Build parameters, moments and a batch."""
        from jaxbench import initial
        from jaxbench.memory import decoder, decoder_config
        from jaxbench.memory.config import NeuralMemoryConfig
        from jaxbench.pretrained import weights

        case, plain = self.case, self._first_layers(weights.read_config(self.model))
        small = {"vocab_size": min(plain.vocab_size, self.VOCABULARY)}
        # With random weights only the shape matters. Attention next to a memory has no biases, and plain RoPE.
        plain = plain.model_copy(update=small | {"rope_scaling": None, "use_bias": False, "position": "rotary"})
        neural = NeuralMemoryConfig(
            d_model=plain.d_model, num_heads=plain.num_heads, head_dim=plain.head_dim, chunk_size=case["chunk"]
        )
        has_attention = case["kind"] != "lmm"
        memory = decoder_config.DecoderMemory(
            kind=case["kind"], neural=neural, insert=not has_attention, window=case["chunk"] if has_attention else None
        )
        shape = decoder_config.with_memory(plain, memory)
        params = initial.initial_params(shape, 0)
        self._start(decoder.build(shape, params, dtype=case["dtype"]), params, shape.vocab_size)


class Tokenizing:
    """Tokenisation of the beginning of the default text."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Load tokenizer and text.

        Raises:
          ValueError: the model has no tokenizer.
        """
        from jaxbench.pretrained import assets, tokenizer

        self.words = tokenizer.load_tokenizer(self.model)
        text = assets.default_text()
        self.text = (text * (1 + self.case["characters"] // len(text)))[: self.case["characters"]]

    def prepare(self) -> dict[str, Any]:
        """Prepare nothing: nothing is compiled."""
        return {}

    def measure(self) -> dict[str, Any]:
        """Tokenise the whole text at once."""
        started = time.perf_counter()
        ids = self.words.encode(self.text, add_special=False)
        return {"seconds": time.perf_counter() - started, "tokens": len(ids)}


class Detection:
    """Watermark scores and p-values of texts of random tokens."""

    VOCABULARY = 49152
    PROMPT = 8  # tokens before a marked text: as many as the longest default context reads

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case = case

    def load(self) -> None:
        """Build the detector and the texts."""
        from jaxbench.watermark import detect, detection, keys

        self.detector = detect.Detector(self.case["scheme"], vocab_size=self.VOCABULARY)
        self.detect, self.key = detection.detect, keys.Key(KEY)
        size = (self.case["batch"], self.case["tokens"])
        ids = np.random.default_rng(0).integers(0, self.VOCABULARY, size).astype(np.int32)
        self.ids = detection.as_ids(ids, None, vocab_size=self.VOCABULARY)
        self.marked = (
            detection.as_ids(self._marked(), None, vocab_size=self.VOCABULARY) if self.case["marked"] else None
        )
        self.found: dict[str, float] = {}

    def _marked(self) -> np.ndarray:
        """Return random prompts with continuations sampled from uniform logits under the scheme's watermark."""
        from jaxbench.watermark import host_loop, logits_processor

        random, count = np.random.default_rng(1), self.case["marked"]
        watermark = logits_processor.Watermark(self.case["scheme"], vocab_size=self.VOCABULARY)
        mark = host_loop.HostLoop(watermark, [self.key] * count)
        ids = random.integers(0, self.VOCABULARY, (count, self.PROMPT)).astype(np.int32)
        even = np.zeros((count, self.VOCABULARY), np.float32)
        for _ in range(self.case["marked_tokens"]):
            waits = random.standard_exponential(even.shape, dtype=np.float32)
            gumbel = -np.log(np.maximum(waits, np.finfo(np.float32).tiny))
            chosen = np.argmax(np.asarray(mark(ids, even)) + gumbel, axis=1)
            ids = np.concatenate([ids, chosen[:, None].astype(np.int32)], axis=1)
        return ids

    def prepare(self) -> dict[str, Any]:
        """Compute the share of marked texts that are found, the same every time; the first call compiles."""
        self.measure()
        if self.marked is not None:
            found = self.detect(self.detector, self.marked, self.key, prompt_lengths=self.PROMPT, payload=None)
            rate = np.mean(np.asarray(found.p_value) <= self.case["false_alarms"])
            self.found = {"detection_rate": float(rate)}
        return {}

    def measure(self) -> dict[str, Any]:
        """Score all texts at once."""
        started = time.perf_counter()
        found = self.detect(self.detector, self.ids, self.key, prompt_lengths=None, payload=None)
        np.asarray(found.p_value)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": self.case["batch"] * self.case["tokens"], **self.found}


class Quality:
    """The model's loss on the default text's first windows."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Load the model and the text's windows.

        Raises:
          ValueError: the model has no tokenizer, or a shorter context; or the text is too short.
        """
        from jaxbench import transformer
        from jaxbench.pretrained import assets, tokenizer, weights

        held, (count, length) = weights.load_checkpoint(self.model), (self.case["windows"], self.case["seq_len"])
        self.built = transformer.build(held.config, held.params, dtype=self.case["dtype"])
        words, text = tokenizer.load_tokenizer(self.model), assets.default_text()
        ids = np.array(words.encode(text, add_special=False)[: count * (length + 1)], np.int32)
        if length > held.config.max_seq_len:
            raise ValueError(f"quality: seq_len={length} is above the model's context of {held.config.max_seq_len}")
        if len(ids) < count * (length + 1):
            raise ValueError(
                f"quality: windows={count} of {length + 1} tokens (seq_len={length} and the first) are more than the "
                f"text's {len(ids)}"
            )
        self.rows = ids.reshape(count, length + 1)
        size = lambda ids: len(words.decode(ids).encode())
        # Of the predicted tokens alone. A difference, because decoders drop the space before a text's first token.
        self.bytes = sum(size(row) - size(row[:1]) for row in self.rows.tolist())

    def prepare(self) -> dict[str, Any]:
        """Compile the forward pass."""
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
        """Measure bits per byte, the same every time."""
        nats = float(self.program(self.built, self.rows))
        return {"bits_per_byte": nats / np.log(2) / self.bytes}


WORKLOADS = {
    "generation": Generation, "training": Training, "tokenizing": Tokenizing, "detection": Detection,
    "quality": Quality, "native": Native, "memory": Memory,
}  # fmt: skip
