"""Cases of a suite that need one workload's own library, run on whichever jaxbench tree the process imports.

Cases work as in cases.py: each loads what it needs, prepares its programs and takes one measurement per call. The two
WORKLOADS tables are merged. Both files are loaded by path next to another tree's library, so neither imports the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

# About the default text's paragraphs, each found by a unique phrase: (phrase, question, answer).
QUESTIONS = (
    (
        "PEP 3119 - Introducing Abstract Base Classes",
        "Which module implements abstract base classes?",
        "the abc module",
    ),
    ("Compound statements contain (groups of)", "What do compound statements contain?", "other statements"),
    ("Python uses the termination model", "Which model of error handling does Python use?", "the termination model"),
    ("If no expressions are present, raise", "What is raised if there is no active exception?", "a RuntimeError"),
    ("Dictionaries preserve insertion order", "Which order do dictionaries preserve?", "insertion order"),
    ("A file object represents an open file", "Which function creates a file object?", "the open() function"),
    ("If there are more positional arguments", "What is raised for too many arguments?", "a TypeError"),
    ("A list display yields a new list", "What does a list display yield?", "a new list object"),
)
LEAST_ERROR = 2.0**-53  # half of float64's last place: an error of 0, of equal tensors, gives no ratio to judge


def asked_about(text: str) -> list[tuple[str, str, str]]:
    """Return each of QUESTIONS with its paragraph of the text: (paragraph, question, answer)."""
    paragraphs = text.replace("\f", "\n\n").split("\n\n")
    return [(next(each for each in paragraphs if phrase in each), *asked) for phrase, *asked in QUESTIONS]


class Answers:
    """The model's loss on answers to questions about the default text."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Load the model, and build a row for each question: paragraph, question and answer.

        Raises:
          ValueError: the model has no tokenizer.
        """
        from jaxbench import transformer
        from jaxbench.pretrained import assets, tokenizer, weights

        held = weights.load_checkpoint(self.model)
        self.built = transformer.build(held.config, held.params, dtype=self.case["dtype"])
        words, texts = tokenizer.load_tokenizer(self.model), []
        for paragraph, question, answer in asked_about(assets.default_text()):
            asked = f"{paragraph}\n\nQuestion: {question}\nAnswer:"
            texts.append([words.encode(text, add_special=False) for text in (asked, f" {answer}.")])
        longest = max(len(asked) + len(answer) for asked, answer in texts)
        size = min(longest, held.config.max_seq_len)
        self.rows = np.zeros((len(texts), size), np.int32)
        self.is_answer = np.zeros((len(texts), size), bool)
        for row, (asked, answer) in enumerate(texts):
            ids = (asked + answer)[-size:]  # keep the end where the row exceeds a short model's context
            self.rows[row, : len(ids)] = ids
            self.is_answer[row, len(ids) - len(answer) : len(ids)] = True

    def prepare(self) -> dict[str, Any]:
        """Compile the forward pass."""
        import jax
        import jax.numpy as jnp

        def nats(model: Any, rows: Any, is_answer: Any) -> Any:
            places = jnp.broadcast_to(jnp.arange(rows.shape[1] - 1, dtype=jnp.int32), rows[:, 1:].shape)
            logits = model(rows[:, :-1], places).astype(jnp.float32)
            own = jnp.take_along_axis(logits, rows[:, 1:, None], axis=2)[:, :, 0]
            loss = jax.nn.logsumexp(logits, axis=2) - own
            return jnp.sum(jnp.where(is_answer[:, 1:], loss, 0.0)) / jnp.sum(is_answer)

        self.program = jax.jit(nats).lower(self.built, self.rows, self.is_answer).compile()
        return {"forward": self.program}

    def measure(self) -> dict[str, Any]:
        """Measure nats per token of the answers, the same every time."""
        return {"answer_nll": float(self.program(self.built, self.rows, self.is_answer))}


class Compression:
    """Compression of the beginning of the default text into vectors, and what a decoder reads from vectors."""

    found: Mapping[str, float] = {}  # what the decoder reads from vectors

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Load compressor and text."""
        from jaxbench.compress.auto import AutoCompressor
        from jaxbench.pretrained import assets, tokenizer

        self.compressor = AutoCompressor.from_pretrained(f"rfcc-base-{self.case['ratio']}x", model=self.model)
        self.words = tokenizer.load_tokenizer(self.model)
        self.all_text = assets.default_text()
        self.ids = np.array(self.words.encode(self.all_text, add_special=False), np.int32)
        self.text = self.words.decode(self.ids[: self.case["tokens"]].tolist())

    def prepare(self) -> dict[str, Any]:
        """Compile by making a first call, and compute what the decoder reads, the same every time."""
        self._compressed([self.text[:400]])
        if self.case["read"]:
            self.found = self._read()
        return {}

    def _compressed(self, texts: list[str]) -> list[Any]:
        """Return the results of texts, compressed as the case says: a chunk a call, or several."""
        if self.case["batch"] == 1:
            return [self.compressor.compress(text) for text in texts]
        return self.compressor.compress_all(texts, batch=self.case["batch"])

    def _read(self) -> dict[str, float]:
        """Let the decoder read vectors of windows of the text and of QUESTIONS' paragraphs, with teacher forcing.

        Returns:
          read_back_rate: share of the tokens of the windows' first chunks that are the most probable ones after their
            vectors. answer_nll: nats per token of the right answers after vectors. retention: (loss without the
            paragraph - loss after vectors) / (loss without - loss after the whole paragraph), 0 where vectors are no
            better than nothing, NaN where the paragraph is not. Definitions: compress/evaluate.py and answering.py.
        """
        from jaxbench import transformer
        from jaxbench.compress import answering, config, evaluate, questions, reading
        from jaxbench.pretrained import weights

        held, own = weights.load_checkpoint(self.model), self.compressor
        built = transformer.build(held.config, own.reader(held.params), dtype="float32")
        tokens_of = lambda text: np.array(self.words.encode(text, add_special=False), np.int32)
        firsts = np.linspace(0, len(self.ids) - self.case["read_tokens"], self.case["read"]).astype(int)
        windows = [self.words.decode(self.ids[first:][: self.case["read_tokens"]].tolist()) for first in firsts]
        again, rows = own.tag(config.TAGS.index("reconstruct")), []
        for text, made in zip(windows, self._compressed(windows), strict=True):
            chunk = tokens_of(text)[: own.config.chunk]
            inside = made.vectors[: -(-len(chunk) // own.ratio)]
            rows.append(reading.behind_vectors(inside, again, chunk, size=held.config.vocab_size))
        asked = asked_about(self.all_text)
        for (paragraph, question, answer), made in zip(asked, self._compressed([each[0] for each in asked])):
            words, right = tokens_of(questions.asked(question)), tokens_of(f" {answer}")
            prompts = [answering.in_clear(own, tokens_of(text), words) for text in ("", paragraph)]
            for prompt in [*prompts, answering.behind(own, made.vectors, words)]:
                rows.append(reading.Row(np.array([*prompt.ids, *right[:-1]], np.int32), right, prompt.vectors))
        heard, count = reading.Reader(built)(rows), len(windows)
        losses = np.array([each.losses.mean() for each in heard[count:]], np.float64).reshape(-1, 3)
        kept, *_ = evaluate.share(*losses.T, [0] * len(losses), better="lower")
        return {
            "read_back_rate": float(np.mean(np.concatenate([each.hits for each in heard[:count]]))),
            "answer_nll": float(losses[:, 2].mean()), "retention": float(np.maximum(kept, 0.0)),
        }  # fmt: skip

    def measure(self) -> dict[str, Any]:
        """Compress the text at once, including tokenisation."""
        started = time.perf_counter()
        (made,) = self._compressed([self.text])
        seconds, count = time.perf_counter() - started, made.original_length
        return {
            "seconds": seconds, "tokens": count, "tokens_per_vector": count / len(made.vectors), **self.found,
        }  # fmt: skip


class Hallucination:
    """Features of an answer over a context, both of the default text."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Load the reader, the context, and as the answer the text that follows it."""
        from jaxbench.hallucination import extract, group, reader_settings
        from jaxbench.pretrained import assets

        self.settings = reader_settings.ReaderSettings(model=self.model, dtype=self.case["dtype"])
        self.reader, self.words, self.window = extract.load_reader(self.settings, package="jaxbench")
        self.read_group, count = group.read_group, self.case["context_tokens"]
        ids = self.words.encode(assets.default_text(), add_special=False)[: count + self.case["answer_tokens"]]
        context, answer = (self.words.decode(part) for part in (ids[:count], ids[count:]))
        self.group = group.Group(context, "What does the text say?", (answer,), ("0",))

    def prepare(self) -> dict[str, Any]:
        """Compile by making a first call."""
        self.measure()
        return {}

    def measure(self) -> dict[str, Any]:
        """Score one answer with its context, which is read again each time, including tokenisation."""
        started = time.perf_counter()
        list(self.read_group(self.group, self.reader, self.words, self.window, self.settings))
        tokens = self.case["context_tokens"] + self.case["answer_tokens"]
        return {"seconds": time.perf_counter() - started, "tokens": tokens}


class Serving:
    """Requests that arrive together at the server's engine."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case, self.model = case, model

    def load(self) -> None:
        """Build the engine's settings; the engine loads its weights when it compiles."""
        from jaxbench.serve import request, settings

        case = self.case
        limits = {"max_running": case["requests"], "max_batch_tokens": case["batch_tokens"]}
        length = case["prompt_tokens"] + case["new_tokens"]
        slots = {"segment": case["batch_tokens"] - case["requests"], "slot_tokens": length}
        self.config = settings.EngineConfig(
            model=self.model, kernels=case["kernels"], cache_tokens=max(128, 4 * case["requests"] * length),
            limits=limits, **(slots if case["kernels"] == "xla" else {}),
        )  # fmt: skip
        self.config.read_config(self.model)
        self.load_engine, self.request = settings.load_engine, request.Request
        self.random = np.random.default_rng(0)

    def prepare(self) -> dict[str, Any]:
        """Load weights, allocate blocks and compile programs.

        Raises:
          NotAvailable: native kernels are requested but not available here.
        """
        self.engine = self.load_engine(self.config)
        return {}

    def measure(self) -> dict[str, Any]:
        """Run all requests to their last token; prompts are new each time, so that none is in the cache."""
        case, size = self.case, self.engine.runner.vocab_size
        rows = self.random.integers(0, size, (case["requests"], case["prompt_tokens"])).tolist()
        found = answered(self.engine, self.request, rows, case["new_tokens"])
        return found | {"tokens": case["requests"] * case["new_tokens"]}


def answered(engine: Any, request: Any, rows: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Time requests that arrive together: seconds until all are answered, median first-token time, and token gaps.

    request: jaxbench.serve.request.Request of the engine's tree.

    Raises:
      ValueError: a request ends with an error.
    """
    started = time.perf_counter()
    for number, row in enumerate(rows):
        engine.add(request(str(number), tuple(row), new_tokens))
    first: list[float] = []
    last: dict[str, float] = {}
    gaps: list[float] = []
    while engine.is_busy:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise ValueError(f"serving: request {event.id} ended with {event.error}")
            if event.id in last:
                gaps.append(now - last[event.id])
            else:
                first.append(now - started)
            last[event.id] = now
    seconds = time.perf_counter() - started
    return {"first_token_s": float(np.median(first)), "end_to_end_s": seconds, "seconds": seconds, "token_s": gaps}


class Parity:
    """The largest float64 error of one row of the parity table."""

    def __init__(self, case: Mapping[str, Any], model: str | None):
        self.case = case

    def load(self) -> None:
        """Load the row's model on both sides."""
        from jaxbench.parity import cases, distance, evidence, run

        row = cases.find(self.case["row"])
        config, params = cases.load(row)
        self.row, self.arrays, self.run = row, cases.arrays(row, config), run
        self.seed, self.compare = evidence.SEED, distance.compare
        with run.pinned("float64"):
            self.sides = run.sides(row, config, params, dtype="float64", backend="flax")

    def prepare(self) -> dict[str, Any]:
        """Compile by making a first call."""
        self.measure()
        return {}

    def measure(self) -> dict[str, Any]:
        """Measure the relative error of loss and module outputs, and of gradients if requested."""
        with self.run.pinned("float64"), self.run.torch_threads(self.row):
            ours, reference = (
                side.trace(self.arrays, gradients=self.case["gradients"], seed=self.seed) for side in self.sides
            )
        errors = [LEAST_ERROR, self.compare({"loss": ours.loss}, {"loss": reference.loss}, kind="loss").worst.error]
        for kind in ("outputs", "output_gradients", "gradients"):
            values, wanted = getattr(ours, kind), getattr(reference, kind)
            shared = {name: wanted[name] for name in values}  # a scanned model records only its logits
            worst = self.compare(values, shared, kind=kind).worst
            errors += [] if worst is None else [worst.error]
        return {"parity_error": max(errors)}


WORKLOADS = {
    "answers": Answers, "compression": Compression, "hallucination": Hallucination, "serving": Serving,
    "parity": Parity,
}  # fmt: skip
