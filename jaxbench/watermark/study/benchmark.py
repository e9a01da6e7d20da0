"""Measure the speed of detection and watermarked generation, against peers in the same run (S file).

Every engine and peer is a separate process (measure/process.py). In a launch all are alive and one works at a time; the
order of the engines is rotated from launch to launch and reversed every other round. A launch gives one rate per
(engine, case), the median over its rounds; intervals are over launches. Detection runs on one core. Rates are texts per
second of wall-clock time, and also per second of the process's CPU time. Memory is the highest resident set of a
process that does one case and nothing else; the programs are in the compile cache by then.

Results are appended to WORKDIR/records.jsonl as they are measured; a restarted run resumes after the last record.
Records and inputs carry the configuration's id: several configurations may share a workdir.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxbench import cli, config, initial, outputs, store
from jaxbench.generation import decoder
from jaxbench.measure import environment, process
from jaxbench.measure.process import Worker, WorkerError
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.text import packing
from jaxbench.watermark.study import benchmark_report
from jaxbench.watermark.study.benchmark_config import (
    MARKLLM_KGW,
    MARKLLM_UNIGRAM,
    PEERS,
    TRANSFORMERS_KGW,
    Benchmark,
    Detection,
    Memory,
)

TIMEOUT_S = 1800.0  # per request; the slowest is a peer's pass over its texts


def run(
    settings: Benchmark,
    workdir: str | Path,
    *,
    options: decoder.Options = decoder.Options("xla"),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure what the settings name and return the summary; write records, summary, CSV and HTML into the workdir.

    options: kernels of the step that a watermark is added to; records of other kernels stay and are ignored.

    The summary names a missing peer and omits its ratios.

    Raises:
      ValueError: the text is too short, the kernels are not available, or a part of jaxbench itself failed.
    """
    workdir = Path(workdir).absolute()  # workers run in another folder
    bench = _Run(settings, workdir, choose(settings, options))
    if bench.choice.note:
        say(bench.choice.note)
    with contextlib.closing(bench):  # its worker holds a model, which verdicts do not need
        if settings.memory is not None:
            _ = bench.memory_texts  # raises before anything is measured
        if settings.detection is not None:
            bench.inputs()  # first, so that too little text leaves nothing in the workdir
            for number in range(settings.launches):
                bench.once(f"detection-{number}", lambda number=number: bench.detection_launch(number))
        if settings.memory is not None:
            for arm in (*settings.memory.engines, *PEERS):
                bench.once(f"memory-{arm}", lambda arm=arm: bench.memory(arm))
        if settings.generation is not None:
            schemes = [scheme.model_dump(mode="json") for scheme in settings.generation.schemes]
            for scheme in schemes + [{"scheme": "control"}] * settings.generation.control:
                for batch_size in settings.generation.batch_sizes:
                    part = f"generation-{benchmark_report.label(scheme)}-{batch_size}"
                    bench.once(part, lambda s=scheme, b=batch_size: bench.overhead(s, b))
        if settings.throughput is not None:
            for batch_size in settings.throughput.batch_sizes:
                for length in settings.throughput.new_tokens:
                    part = f"throughput-{batch_size}-{length}"
                    bench.once(part, lambda b=batch_size, n=length: bench.throughput(b, n))
    if settings.verdicts is not None:
        bench.once("verdicts", bench.verdicts)
    summary = benchmark_report.summarise(bench.records, settings.model_dump(mode="json"), bench.about())
    benchmark_report.write(summary, workdir)
    return summary


def choose(settings: Benchmark, options: decoder.Options) -> decoder.Choice:
    """Choose the decoding kernels; xla if nothing is decoded, which adds nothing to the configuration's id.

    Raises:
      ValueError: the kernels are not available, or do not support the batch sizes.
    """
    asked = (settings.generation, settings.throughput)
    batches = tuple(size for each in asked if each is not None for size in each.batch_sizes)
    if settings.verdicts is not None:
        batches += (settings.verdicts.texts,)
    if not batches:
        return decoder.XLA
    shape = settings.shape
    read = functools.partial(weights.read_config, settings.model) if shape is None else lambda: shape
    choice = decoder.choose(options, "cpu", config=read)
    decoder.check_rows(choice, max(batches), "benchmark: rows of a batch")
    return choice


class _Run:
    """The state of a run: its records, its inputs and the live generation worker."""

    def __init__(self, settings: Benchmark, workdir: Path, choice: decoder.Choice):
        self.settings, self.workdir, self.choice = settings, workdir, choice
        self.documents = packing.load_text(settings.data)  # raises before anything starts
        self.tokenizer = load_tokenizer(settings.model)
        self.model = settings.model if settings.model == "default" else str(weights.resolve(settings.model).absolute())
        self.vocab_size = (settings.shape or weights.read_config(settings.model)).vocab_size
        self.model_sha256 = weights.checksum(settings.model)
        extra = {"text": packing.text_sha256(settings.data), "model_sha256": self.model_sha256}
        self.id = config.config_id(settings, extra=extra) + choice.suffix()
        self.path = workdir / "records.jsonl"
        rows = map(json.loads, store.rows(self.path))
        self.records = [row for row in rows if row.get("config") == self.id]
        self.missing: dict[str, str] = {}  # in the part being measured
        self._generation: Worker | None = None

    def once(self, part: str, measure: Any) -> None:
        """Measure a part unless its records exist, and append them in one write."""
        if any(row["part"] == part for row in self.records):
            return
        start, self.missing = time.monotonic(), {}
        found = [*measure(), *({"kind": "missing", "what": what, "why": why} for what, why in self.missing.items())]
        rows = [{"config": self.id, "part": part, **row} for row in found]
        store.append(self.path, rows)
        self.records += rows
        cli.keep(f"{len(self.records)} records in {self.path}; the same command goes on")
        print(f"    {part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    def about(self) -> dict:
        """Describe machine, model, missing peers and the commit."""
        facts = environment.describe(threads=environment.usable_cores())
        about = {"config": self.id, "kernels": self.choice.identity(), "model_sha256": self.model_sha256}
        missing = {row["what"]: row["why"] for row in self.records if row["kind"] == "missing"}
        return {**facts, **about, "missing": missing}

    # Workers

    def worker(self, arm: str, *, threads: int) -> Worker | None:
        """Start an arm's process; None if the peer is not installed."""
        try:
            python = process.peer_python(arm) if arm == "markllm" else sys.executable
        except ValueError as error:
            self.missing[arm] = str(error)
            return None
        module = f"jaxbench.watermark.study.{'peer' if arm in PEERS else 'benchmark'}_worker"
        library, log = "PyTorch" if arm in ("torch", *PEERS) else "XLA", self.workdir / "logs" / f"{arm}.log"
        environment = process.environment("cpu", threads=threads, library=library)
        limits = {"threads": threads, "timeout_s": TIMEOUT_S}
        return Worker(arm, module, environment=environment, log=log, python=python, **limits)

    def tokenizer_folder(self) -> str:
        """Return a Hugging Face folder with the tokenizer, as the peers read it."""
        folder = self.workdir / f"tokenizer-{self.id}"
        if not folder.exists():
            with outputs.whole_folder(folder) as made:
                self.tokenizer.save(made)
        return str(folder)

    def model_folder(self) -> str:
        """Return a Hugging Face folder with the model, as the peers read it."""
        folder = self.workdir / f"model-{self.model_sha256[:12]}"
        if not folder.exists():
            checkpoint = weights.load_checkpoint(self.settings.model)
            weights.save_checkpoint(folder, checkpoint.config, checkpoint.params)
        return str(folder)

    # Detection

    def inputs(self) -> str:
        """Write the texts of this configuration and their ids, and return the file's name."""
        path = self.workdir / f"inputs-{self.id}.json"
        wanted = self.settings.detection
        if not path.exists():
            number = max(wanted.texts, wanted.fast_peer_texts)
            texts, ids = cut_texts(self.tokenizer, self.documents, number, wanted.text_tokens)
            outputs.write_json(path, {"texts": texts, "ids": ids})
        return str(path)

    def detection_launch(self, number: int) -> list[dict]:
        """Start every arm, measure every case in alternating order, and return the records."""
        wanted = self.settings.detection
        arms = process.turn([*wanted.engines, *PEERS], number)
        path, rows = self.inputs(), []
        live = {arm: started for arm in arms if (started := self.worker(arm, threads=1)) is not None}
        try:
            for arm in list(live):
                self._start(live, arm, path)
            for turn in range(wanted.rounds):
                for arm in list(live)[:: 1 if turn % 2 == 0 else -1]:
                    rows += self._measured(live[arm], number)
        finally:
            for worker in live.values():
                worker.close()
        return rows

    def _measured(self, worker: Worker, number: int) -> list[dict]:
        """Return the records of one pass; a case that an arm cannot run is listed as missing."""
        wanted, rows = self.settings.detection, []
        for case in cases(worker.name, wanted):
            try:
                answer = worker.request("measure", **case, repeats=wanted.repeats)
            except WorkerError as error:
                if error.fatal:
                    raise
                self.missing[f"{worker.name} {benchmark_report.label(case['scheme'])} {case['part']}"] = str(error)
                continue
            rows.append({"kind": "detection", "arm": worker.name, "launch": number, "case": case, **answer})
        return rows

    @functools.cached_property
    def memory_texts(self) -> tuple[list[str], list[list[int]]]:
        """The texts whose detection is measured for memory, and their ids."""
        asked = self.settings.memory
        return cut_texts(self.tokenizer, self.documents, max(asked.batch_sizes), asked.text_tokens)

    def memory(self, arm: str) -> list[dict]:
        """Measure every case of an arm in a fresh process, once the programs of all are in the compile cache."""
        listed = memory_cases(arm, self.settings.memory)
        if arm not in PEERS:
            self._memory_of(arm, listed)
        return [row for case in listed for row in self._memory_of(arm, [case])]

    def _memory_of(self, arm: str, listed: list[dict]) -> list[dict]:
        """Run cases in one process, and return their records; a peer that fails is listed as missing."""
        (texts, ids), rows = self.memory_texts, []
        worker = self.worker(arm, threads=1)
        if worker is None:
            return []
        with worker:
            try:
                tokenizer = self.tokenizer_folder() if arm in PEERS else self.model
                worker.request("start", tokenizer=tokenizer, vocab_size=self.vocab_size)
                for case in listed:
                    size, sent = case["batch_size"], {k: v for k, v in case.items() if k != "batch_size"}
                    answer = worker.request("memory", **sent, texts=texts[:size], ids=ids[:size])
                    rows.append({"kind": "memory", "arm": arm, "case": case, **answer})
            except WorkerError as error:
                if arm not in PEERS:
                    raise
                self.missing[arm] = str(error)
        return rows

    def _start(self, live: dict[str, Worker], arm: str, path: str) -> None:
        tokenizer = self.tokenizer_folder() if arm in PEERS else self.model
        try:
            live[arm].request("start", tokenizer=tokenizer, vocab_size=self.vocab_size, path=path)
        except WorkerError as error:
            if arm not in PEERS:
                raise
            self.missing[arm] = str(error)
            live.pop(arm).close()

    # Generation

    def overhead(self, scheme: dict, batch_size: int) -> list[dict]:
        """Measure one scheme at one batch size; return one record."""
        wanted = self.settings.generation
        prompts = packing.real_prompts(self.tokenizer, [wanted.prompt_tokens] * batch_size, self.documents)
        arguments = wanted.model_dump(include={"new_tokens", "rounds", "loop_steps", "loop_rounds"})
        answer = self._decoding().request("overhead", scheme=scheme, prompts=prompts, **arguments)
        return [{"kind": "generation", "scheme": scheme, "batch_size": batch_size, **answer}]

    def throughput(self, batch_size: int, new_tokens: int) -> list[dict]:
        """Measure every scheme at one batch size and length: first unmarked text, last unmarked text as the control."""
        wanted = self.settings.throughput
        prompts = packing.real_prompts(self.tokenizer, [wanted.prompt_tokens] * batch_size, self.documents)
        control = {"scheme": "control"}
        schemes = [control, *(scheme.model_dump(mode="json") for scheme in wanted.schemes), control]
        answer = self._decoding().request(
            "throughput", schemes=schemes, prompts=prompts, new_tokens=new_tokens, rounds=wanted.rounds
        )
        common = {"kind": "throughput", "batch_size": batch_size, "new_tokens": new_tokens}
        named = zip([{"scheme": "unmarked"}, *schemes[1:]], answer["seconds"], strict=True)
        return [
            common | {"scheme": scheme, "seconds": seconds, "plain": answer["seconds"][0], "rss": answer["peak_rss"]}
            for scheme, seconds in named
        ]

    def _decoding(self) -> Worker:
        """Return the process that decodes, started at the first request."""
        if self._generation is None:
            self._generation = self.worker("generation", threads=environment.usable_cores())
            self._generation.request("start", model=self._weights(), choice=self.choice._asdict())
        return self._generation

    def _weights(self) -> str:
        """Return the path of the weights that decode."""
        shape = self.settings.shape
        if shape is None:
            return self.model
        folder = self.workdir / f"shape-{self.id}"
        if not folder.exists():
            weights.save_checkpoint(folder, shape, initial.initial_params(shape, 0))
        return str(folder)

    def close(self) -> None:
        """End the generation worker."""
        if self._generation is not None:
            self._generation.close()
            self._generation = None

    # Verdicts

    def verdicts(self) -> list[dict]:
        """Let MarkLLM and jaxbench mark texts with the same lists and each detect them all; one record per text."""
        wanted, scheme = self.settings.verdicts, ours_of(MARKLLM_KGW)
        human = packing.real_prompts(self.tokenizer, [32 + wanted.new_tokens] * wanted.texts, self.documents)
        peer = self.worker("markllm", threads=1)
        if peer is None:
            return [{"kind": "verdict", "missing": self.missing["markllm"]}]
        prompts = {"prompts": [text[:32] for text in human], "new_tokens": wanted.new_tokens, "seed": 0}
        maker = self.worker("generation", threads=environment.usable_cores())
        with peer, self.worker("numpy", threads=1) as ours, maker:
            peer.request("start", tokenizer=self.tokenizer_folder(), vocab_size=self.vocab_size)
            ours.request("start", tokenizer=self.model, vocab_size=self.vocab_size)
            maker.request("start", model=self.model, choice=self.choice._asdict())
            by_peer = peer.request("generate", scheme=MARKLLM_KGW, model=self.model_folder(), **prompts)["ids"]
            by_us = maker.request("generate", scheme=scheme, **prompts)["ids"]
            ids = by_peer + by_us + human
            theirs = peer.request("detect", scheme=MARKLLM_KGW, ids=ids)["detections"]
            own = ours.request("detect", scheme=scheme, ids=ids)["detections"]
        authors = ["markllm"] * len(by_peer) + ["jaxbench"] * len(by_us) + ["human"] * len(human)
        return [{"kind": "verdict", "author": a, "theirs": t, "ours": o} for a, t, o in zip(authors, theirs, own)]


def cases(arm: str, wanted: Detection) -> list[dict]:
    """Return the cases of an arm: arguments of its worker's `measure`."""
    if arm in PEERS:
        slow, fast = wanted.slow_peer_texts, wanted.fast_peer_texts
        given = [(MARKLLM_KGW, slow), (MARKLLM_UNIGRAM, fast)] if arm == "markllm" else [(TRANSFORMERS_KGW, slow)]
        return [{"scheme": own, "part": part, "count": count} for own, count in given for part in ("ids", "text")]
    listed = []
    for index, scheme in enumerate(wanted.schemes):
        case = {"scheme": scheme.model_dump(mode="json"), "count": wanted.texts, "batch_size": wanted.texts}
        listed += [{**case, "part": part} for part in ("ids", "text", "evidence", "statistics")]
        for size in sorted({size for size in wanted.batch_sizes if size < wanted.texts}):
            count = min(wanted.texts, 64 * size)
            listed.append({**case, "part": "ids", "batch_size": size, "count": count})
        if index:
            continue
        listed += [{**case, "part": part} for part in ("tokenise", "split")]
        listed.append({**case, "part": "identify", "keys": wanted.identify_keys})
        listed += [{**case, "part": "neural"}] if arm == "jax" else []
    return listed


def memory_cases(arm: str, wanted: Memory) -> list[dict]:
    """Return the cases whose memory is measured: whole detections of texts, a peer's of one text."""
    if arm in PEERS:
        given = (MARKLLM_KGW, MARKLLM_UNIGRAM) if arm == "markllm" else (TRANSFORMERS_KGW,)
        return [{"scheme": own, "part": "text", "batch_size": 1} for own in given]
    schemes = [scheme.model_dump(mode="json") for scheme in wanted.schemes]
    sizes = sorted(set(wanted.batch_sizes))
    listed = [{"scheme": scheme, "part": "text", "batch_size": size} for scheme in schemes for size in sizes]
    first = {"scheme": schemes[0], "batch_size": sizes[-1]}
    others = [{**first, "part": "identify", "keys": wanted.identify_keys}, {**first, "part": "neural"}]
    return listed + others[: 2 if arm == "jax" else 1]


def ours_of(scheme: dict) -> dict:
    """Return the jaxbench configuration that reproduces MarkLLM's KGW."""
    names = ("gamma", "delta", "hash_key", "prefix_length", "f_scheme", "window_scheme")
    return {"scheme": "kgw_markllm", **{name: scheme[name] for name in names}}


def cut_texts(tokenizer: Any, documents: list[str], number: int, tokens: int) -> tuple[list[str], list[list[int]]]:
    """Cut `number` texts of about `tokens` tokens; return them and exactly `tokens` ids of each.

    Texts overlap if the documents are too short for so many; no two begin at the same place.

    Raises:
      ValueError: the documents are too short even with overlap.
    """
    ids = [token for document in documents for token in tokenizer.encode(document, add_special=False)]
    step = min(tokens, (len(ids) - tokens - 8) // max(1, number))
    if step < 1:
        raise ValueError(f"benchmark: the text has {len(ids)} tokens, too few for {number} texts of {tokens}")
    texts, ids_of_texts = [], []
    for start in range(0, len(ids), step):
        text = tokenizer.decode(ids[start : start + tokens + 8]).replace("\ufffd", "")
        encoded = tokenizer.encode(text, add_special=False)[:tokens]
        if len(encoded) == tokens:
            texts.append(tokenizer.decode(encoded))
            ids_of_texts.append(encoded)
        if len(texts) == number:
            return texts, ids_of_texts
    raise ValueError(f"benchmark: the text gave {len(texts)} texts of {tokens} tokens, wanted {number}")
