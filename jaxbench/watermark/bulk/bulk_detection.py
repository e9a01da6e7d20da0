"""Detection in files larger than memory: chunks to part files to one output, resumable, on several processes.

Every chunk's scores are written under a temporary name and renamed, then its report likewise: a chunk is done when its
report exists. After a crash, even by kill -9, the same command resumes the run and does what is missing.
(S file: the job passes in the backend's detector.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench import outputs, store, worker_pool
from jaxbench.pretrained import assets
from jaxbench.pretrained.tokenizer import identity, load_tokenizer
from jaxbench.result_cache import ResultCacheConfig
from jaxbench.text import lines
from jaxbench.watermark import detection, identify, score_cache
from jaxbench.watermark.bulk import part_files
from jaxbench.watermark.config import num_payloads
from jaxbench.watermark.detector import features
from jaxbench.watermark.schemes.contract import Scheme
from jaxbench.watermark.texts import Encoded, Ragged, TextEncoder

TAKEN = "value"  # p_NAME of a candidate of this name would be the family's p_value


@dataclasses.dataclass(frozen=True)
class Job:
    """What to do with every text; one candidate is tested alone, several as a family."""

    candidates: tuple[identify.Candidate, ...]  # a scheme with payloads is tested for all of them
    make_detector: Callable[..., Any] = detection.NumpyDetector  # or a backend's detect.Detector; pickled
    model: str | None = None  # the model whose tokenizer is used
    vocab_size: int | None = None  # unset: that of the model's tokenizer
    canonicalize: bool = True
    correction: str = "holm"
    field: str = "text"
    prompt_field: str | None = None
    cache: ResultCacheConfig | None = None  # of scores; does not affect them
    neural: str | None = None  # folder of a trained detector, whose p-values are added to the only candidate's


class Worker:
    """Scores chunks; each process works with its own copy."""

    def __init__(self, job: Job, folder: Path, kind: str):
        self.job, self.folder, self.kind = job, folder, kind
        self.vocab_size = job.vocab_size or load_tokenizer(job.model).vocab_size
        self._encoder: TextEncoder | None = None
        self._cache = None  # opened where the chunks are scored: a connection is not pickled
        self._detectors: dict[str, Any] = {}
        if job.neural is not None:  # raises before anything is scored
            self._neural_test()
        self._judge: Any = None  # compiled where the chunks are scored: programs are not pickled

    def __call__(self, chunk: lines.Chunk) -> dict[str, Any]:
        """Score one chunk, write its part and its report, and return the report."""
        start = time.monotonic()
        records, bad = lines.read(chunk, field=self.job.field, prompt_field=self.job.prompt_field)
        records, outside, encoded = self._encode(records)
        columns = {
            "file": np.full(len(records), chunk.path, object),
            "line": np.array([record.line for record in records], np.int64),
            "id": np.array([record.id for record in records], object),
            "num_tokens": encoded.ids.lengths,
            "num_changed": encoded.num_changed,
        }
        prompt = np.array([record.prompt_tokens for record in records], np.int32)
        scores, num_known = self._scores(encoded.ids, prompt)
        columns |= scores
        problems = sorted(bad + outside)
        part_files.write_part(self.folder / f"{chunk.name}.{self.kind}", columns, self.kind)
        report = {
            "name": chunk.name, "path": chunk.path, "bytes": chunk.read_bytes,
            "texts": len(records), "bad": len(problems),
            "first_bad": [[chunk.path, *one] for one in problems[: part_files.LISTED]],
            "known": num_known, "changed": int((encoded.num_changed > 0).sum()),
            "tokens": int(encoded.ids.lengths.sum()), "prompted": int((prompt > 0).sum()),
            "seconds": time.monotonic() - start,
        }  # fmt: skip
        outputs.write_json(self.folder / f"{chunk.name}.json", report)
        return report

    def _encode(self, records: list[lines.Record]) -> tuple[list[lines.Record], list[lines.Bad], Encoded]:
        """Return the records with ids inside the vocabulary, the others as bad lines, and the ids of the former."""
        texts = [i for i, record in enumerate(records) if isinstance(record.content, str)]
        contents: list[Any] = [record.content for record in records]
        changed = np.zeros(len(records), np.int64)
        if texts:
            self._encoder = self._encoder or TextEncoder(
                load_tokenizer(self.job.model), vocab_size=self.vocab_size, canonicalize=self.job.canonicalize
            )
            encoded = self._encoder.encode([records[i].content for i in texts])
            if len(texts) == len(records):
                return records, [], encoded
            changed[texts] = encoded.num_changed
            for row, i in enumerate(texts):
                contents[i] = encoded.ids.text(row)
        largest = [max(ids, default=0) if isinstance(ids, list) else 0 for ids in contents]
        kept = [i for i, token in enumerate(largest) if token < self.vocab_size]
        outside = [
            lines.Bad(records[i].line, f"token {token} is outside the vocabulary of {self.vocab_size}")
            for i, token in enumerate(largest)
            if token >= self.vocab_size
        ]
        ids = Ragged.from_lists([contents[i] for i in kept])
        return [records[i] for i in kept], outside, Encoded(ids, changed[kept])

    def _detector(self, scheme: Scheme, *, vocab_size: int, green_lists: Any) -> Any:
        name = f"{scheme}"
        if name not in self._detectors:
            self._detectors[name] = self.job.make_detector(scheme, vocab_size=vocab_size, green_lists=green_lists)
        return self._detectors[name]

    def _neural_test(self) -> Any:
        from jaxbench.watermark.detector import neural_detection

        judge = neural_detection.NeuralTest(self.job.neural, vocab_size=self.vocab_size)
        for candidate in self.job.candidates:
            judge.check(candidate.scheme)
        return judge

    def _scores(self, ids: Ragged, prompt: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
        """Return the columns of scores, and how many scores were not computed (cached or duplicates)."""
        candidates = self.job.candidates
        if self.job.cache is not None and self._cache is None:
            self._cache = self.job.cache.open()
        if len(candidates) == 1:
            candidate = candidates[0]
            detector = self._detector(candidate.scheme, vocab_size=self.vocab_size, green_lists=candidate.green_lists)
            one, num_known = score_cache.detect(detector, ids, candidate.key, self._cache, prompt_lengths=prompt)
            columns = one._asdict()
            if self.job.neural is not None:
                self._judge = self._judge or self._neural_test()
                verdicts = self._judge.detect(detector, ids, candidate.key, prompt_lengths=prompt)
                columns |= {f"neural_{name}": column for name, column in verdicts._asdict().items()}
            return columns, num_known
        identified = identify.identify(
            candidates, ids, vocab_size=self.vocab_size, make_detector=self._detector,
            correction=self.job.correction, prompt_lengths=prompt, cache=self._cache,
        )  # fmt: skip
        columns = {f"p_{name}": identified.p_values[:, i] for i, name in enumerate(identified.names)}
        columns |= {f"corrected_p_{name}": identified.corrected[:, i] for i, name in enumerate(identified.names)}
        columns |= {
            f"payload_{candidate.name}": identified.payloads[:, i]
            for i, candidate in enumerate(candidates)
            if num_payloads(candidate.scheme) > 1
        }
        best = {"best": np.array(identified.names, object)[identified.best], "p_value": identified.p_value}
        return best | columns, identified.num_known


def run(
    pattern: str,
    output: str,
    job: Job,
    *,
    processes: int = 1,
    overwrite: bool = False,
    say: Callable[[dict[str, Any], int], None] = lambda report, total_bytes: None,
    engine: Callable[..., Iterable[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Score every text of the files that a pattern names into one file; return the run's report.

    Args:
      output: a .parquet, .jsonl or .csv file. Next to it: `OUTPUT.parts` during the run, and `OUTPUT.report.json`.
      processes: on this machine, each with one thread.
      overwrite: replace an existing output, or parts of another run; never an input.
      say: called with the report of each finished chunk, and the bytes of all files.
      engine: another way to run a Worker over files, see ray_engine.py.

    Raises:
      ValueError: bad input, an output that exists, is an input or is being written by another process, parts of another
        run, a candidate whose column would take another's place, or no usable text at all.
    """
    out, parts = Path(output), part_files.parts_of(Path(output)).absolute()
    part_files.kind_of(out)  # raises for an unknown suffix
    if len(job.candidates) > 1 and any(candidate.name == TAKEN for candidate in job.candidates):
        raise ValueError(
            f"output: a candidate named {TAKEN!r} would have the column p_{TAKEN}, which is that of any of them; "
            "give it another name"
        )
    # a pattern such as **/*.jsonl also matches the parts of an unfinished run
    paths = [path for path in lines.find(pattern) if parts not in Path(path).absolute().parents]

    def check() -> None:
        outputs.check_file(out, paths, overwrite=overwrite)
        outputs.check_file(f"{out}.report.json", paths, overwrite=overwrite or parts.exists())

    check()
    with store.alone(out):
        check()  # again: another command may have finished in between
        return _run(pattern, paths, out, job, processes, overwrite, say, engine)


def _run(
    pattern: str, paths: list[str], out: Path, job: Job, processes: int, overwrite: bool,
    say: Callable[[dict[str, Any], int], None], engine: Callable[..., Iterable[dict[str, Any]]] | None,
) -> dict[str, Any]:  # fmt: skip
    """Do the work of `run`, under its lock."""
    start, kind = time.monotonic(), part_files.kind_of(out)
    keys = [candidate.key for candidate in job.candidates]
    folder = part_files.open_parts(out, paths, describe(job), keys, overwrite=overwrite)
    done = part_files.finished(folder)
    total_bytes = sum(os.path.getsize(path) for path in paths)
    for report in done.values():
        say(report, total_bytes)
    work = engine or (local_engine if processes > 1 else serial_engine)
    try:
        for report in work(Worker(job, folder, kind), paths, processes=processes, skip=frozenset(done)):
            done[report["name"]] = report
            say(report, total_bytes)
    except BaseException:
        if not done:  # nothing to resume from
            shutil.rmtree(folder)
        raise
    reports = [done[name] for name in sorted(done)]
    summary = _summary(reports, paths, time.monotonic() - start)
    if not summary["texts"]:
        problem = "; {} line {}: {}".format(*summary["first_bad"][0]) if summary["bad"] else ""
        shutil.rmtree(folder)
        raise ValueError(f"input: {pattern} holds no usable text ({summary['bad']} bad lines{problem})")
    outputs.check_file(out, overwrite=overwrite)
    part_files.merge(folder, [report["name"] for report in reports], out, kind)
    outputs.write_json(Path(f"{out}.report.json"), summary)
    shutil.rmtree(folder)
    return summary


def _summary(reports: list[dict[str, Any]], paths: list[str], seconds: float) -> dict[str, Any]:
    counts = ("texts", "bad", "known", "changed", "tokens", "prompted")
    totals = {name: sum(report[name] for report in reports) for name in counts}
    listed = [problem for report in reports for problem in report["first_bad"]][: part_files.LISTED]
    work = sum(report["seconds"] for report in reports)
    return totals | {"files": len(paths), "seconds": seconds, "work_seconds": work, "first_bad": listed}


# Engines: chunks in, reports out


def serial_engine(worker: Worker, paths: list[str], *, processes: int, skip: frozenset[str]) -> Iterable[dict]:
    """Return the reports of all chunks, processed serially in this process."""
    return map(worker, todo(paths, skip))


def local_engine(worker: Worker, paths: list[str], *, processes: int, skip: frozenset[str]) -> Iterator[dict]:
    """Yield the reports of all chunks, processed on this machine by processes of one thread each."""
    return worker_pool.results(worker, todo(paths, skip), processes=processes)


def todo(paths: list[str], skip: frozenset[str]) -> Iterator[lines.Chunk]:
    """Yield the unfinished chunks of all files."""
    for file, path in enumerate(paths):
        yield from (chunk for chunk in lines.chunks(path, file) if chunk.name not in skip)


def describe(job: Job) -> str:
    """Describe what decides a job's scores, without keys, as canonical JSON; a model by its tokenizer's content."""
    fields = {
        field.name: getattr(job, field.name)
        for field in dataclasses.fields(job)
        if field.name not in ("make_detector", "cache", "neural")
    }
    fields["candidates"] = [[candidate.name, candidate.scheme.model_dump(mode="json")] for candidate in job.candidates]
    if job.model is not None:  # another model may be at the same path when the run resumes
        text = identity(load_tokenizer(job.model).core)
        fields["tokenizer"] = hashlib.sha256(text.encode()).hexdigest()
    if job.neural is not None:
        *_, record = features.load(job.neural)
        fields["neural"] = [record["sha256"], assets.sha256_file(features.calibration_file(job.neural))]
    return json.dumps(fields, sort_keys=True)
