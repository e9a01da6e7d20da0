"""Answer a file of requests with a file of answers, through the running batch (S file).

Lines are those of OpenAI's batch interface (https://platform.openai.com/docs/api-reference/batch): custom_id, method,
url and body in; id, custom_id, response and error out, in the order of the input. Answers go into a part file as they
finish, from which the same command resumes; a request that cannot be served gets its status, as from the server.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic

from jaxbench import outputs, store
from jaxbench.generation import requests as texts
from jaxbench.serve import intake, stream
from jaxbench.serve.protocol import ChatBody, CompletionBody, error_body, problem
from jaxbench.serve.service import Refused, Service, are_refused

URLS: dict[str, tuple[type, type[stream.Form]]] = {
    "/v1/completions": (CompletionBody, stream.Completion),
    "/v1/chat/completions": (ChatBody, stream.Chat),
}
PREFIX = "batch-"  # of an answer's id; the number of its line follows
FORMAT = 6  # version of the answers; a part file of another one is not resumed
ATTEMPTS = 3  # of a request whose engine died under it; the last one runs alone
PAUSE_S = 0.02  # of a request that the engine has no room for


class Line(pydantic.BaseModel):
    """A request of the file."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)
    custom_id: str = pydantic.Field(min_length=1, max_length=512)
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


class Job(NamedTuple):
    """A file and where its answers go."""

    source: Path
    part: Path  # answers in the order in which they finished, until all are
    output: Path
    total: int
    overwrite: bool = False


def lines(source: Path) -> Iterator[Line]:
    """Yield the requests of a file; blank lines are skipped.

    Raises:
      ValueError: a line is not a request; the message names it.
    """
    with open(source, "rb") as file:
        for number, text in enumerate(file, 1):
            if number == 1:
                text = text.removeprefix(codecs.BOM_UTF8)  # as Windows editors write it
            if not text.strip():
                continue
            try:
                line = Line.model_validate_json(text)
                json.loads(text, object_pairs_hook=texts.unrepeated)
            except pydantic.ValidationError as error:
                raise ValueError(f"--input={source} line {number}: {problem(error, whole='')}") from error
            except texts.Twice as error:
                said = f"the key {error} twice in one object; wanted it once"
                raise ValueError(f"--input={source} line {number} has {said}") from error
            yield line


def check(source: str, output: str, identity: list[Any], *, overwrite: bool) -> Job:
    """Check all requests, and return the job; identity: what the answers depend on in addition to the file.

    Raises:
      ValueError: there is no request, a line is not one, two have the same custom_id, or the output cannot be written.
    """
    path, target = Path(source), outputs.check_file(output, (source,), overwrite=overwrite)
    if not path.is_file():
        raise ValueError(f"--input={source} is no file")
    seen: set[str] = set()
    for number, line in enumerate(lines(path), 1):
        if line.custom_id in seen:
            raise ValueError(f"--input={source}: request {number} has custom_id {line.custom_id[:60]!r} of another one")
        seen.add(line.custom_id)
    if not seen:
        raise ValueError(f"--input={source} holds {len(seen)} requests; wanted some")
    stat = path.stat()
    whole = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns, *identity])
    name = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return Job(path, target.with_name(f"{target.name}.{name}.part"), target, len(seen), overwrite)


async def run(service: Service, name: str, job: Job, advance: Callable[[int], Any]) -> int:
    """Answer what the part file does not have yet, and move it to the output; return how many requests failed.

    name: the model's, as bodies give it.

    Raises:
      ValueError: the model cannot be loaded, or the output has appeared meanwhile.
    """
    outputs.check_file(job.output, overwrite=job.overwrite)  # again: another command may have ended since
    finished = _finished(job.part)
    advance(len(finished))
    waiting: set[asyncio.Task[dict[str, Any]]] = set()
    turns = Turns()
    try:
        for number, line in enumerate(lines(job.source)):
            if number in finished:
                continue
            waiting.add(asyncio.create_task(_answered(service, name, f"{PREFIX}{number}", line, turns)))
            if len(waiting) >= service.config.engine.limits.max_requests:
                waiting = await _written(waiting, job.part, advance)
        while waiting:
            waiting = await _written(waiting, job.part, advance)
    finally:
        for task in waiting:
            task.cancel()
    return _put_in_order(job)


def _finished(part: Path) -> dict[int, int]:
    """Return where each answer of a part file begins, by the number of its line; a row cut short is removed."""
    found: dict[int, int] = {}
    if not part.exists():
        return found
    with open(part, "r+b") as file:
        begin = 0
        for row in file:
            if not row.endswith(b"\n"):
                os.truncate(part, begin)
                break
            found[int(json.loads(row)["id"].removeprefix(PREFIX))] = begin
            begin += len(row)
    return found


async def _written(waiting: set[asyncio.Task], part: Path, advance: Callable[[int], Any]) -> set[asyncio.Task]:
    """Write the next answers that are ready, with one wait for the disk; return the others."""
    ready, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    rows = [task.result() for task in ready if task.exception() is None]
    store.append(part, rows)
    advance(len(rows))
    for task in ready:
        task.result()  # raises its exception
    return waiting


def _put_in_order(job: Job) -> int:
    """Write the answers of the part file to the output in the order of the lines; return how many are errors."""
    failed = 0
    with open(job.part, "rb") as file:
        begins = _finished(job.part)
        outputs.check_file(job.output, overwrite=job.overwrite)
        with outputs.whole(job.output) as path, open(path, "wb") as target:
            for number in sorted(begins):
                file.seek(begins[number])
                row = file.readline()
                failed += json.loads(row)["response"]["status_code"] != 200
                target.write(row)
            target.flush()
            os.fsync(target.fileno())  # before the part file goes
    job.part.unlink()
    return failed


class Turns:
    """Lets attempts run either concurrently or alone."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._running: set[asyncio.Future[None]] = set()
        self.submitting = asyncio.Lock()  # held by the attempt that waits for room in the engine

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Run concurrently with others, once no attempt runs alone."""
        async with self._alone:
            own = asyncio.get_running_loop().create_future()
            self._running.add(own)
        try:
            yield
        finally:
            self._running.discard(own)
            own.set_result(None)

    @contextlib.asynccontextmanager
    async def last(self) -> AsyncIterator[None]:
        """Wait for all attempts in progress, then run alone."""
        async with self._alone:
            while self._running:
                await asyncio.wait(self._running)
            yield


async def _answered(service: Service, name: str, id: str, line: Line, turns: Turns) -> dict[str, Any]:
    """Return the answer to a line, as the server would give it.

    turns: the last attempt runs alone, so that a request that kills the engine does not use up those of others.
    """
    status, value = 500, error_body("the engine failed", "server_error")
    for attempt in range(ATTEMPTS):
        async with turns.last() if attempt == ATTEMPTS - 1 else turns.beside():
            try:
                status, value = await _attempt(service, name, f"{id}-{attempt}", line, id, turns)
            except intake.Bad as error:
                status, value = error.status, error.body
        if status != 500:
            break
    response = {"status_code": status, "request_id": id, "body": value}
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": None}


async def _attempt(
    service: Service, name: str, id: str, line: Line, shown: str, turns: Turns
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Return status and body of the answer to a line; 500 where another attempt may succeed. shown: the answer's id.

    Raises:
      Bad: as _submitted, or the body does not validate or asks for a stream, or the engine refuses the request.
    """
    kind, form = URLS[line.url]
    body = intake.checked(line.body, kind)
    if body.stream:
        raise intake.Bad(f"stream={body.stream}: a file has whole answers; leave it out")
    answers = await _submitted(service, name, id, body, turns)
    value, error = await form(shown, name, service.tokenizer, body).whole(answers)
    if error is None:
        return 200, value
    if are_refused(answers):  # another attempt would end alike
        raise intake.Bad(error)
    return 500, error_body(error, "server_error")


async def _submitted(
    service: Service, name: str, id: str, body: CompletionBody | ChatBody, turns: Turns
) -> list[Any]:  # fmt: skip
    """Submit a body as soon as there is room for it; return its answers in progress.

    One body at a time waits for room: each try reads its prompt and tries its grammar, while all answers wait.

    Raises:
      Bad: the model does not take it.
      ValueError: the model cannot be loaded.
    """
    async with turns.submitting:
        while True:
            try:
                return await intake.submitted(service, name, id, body)
            except Refused as error:
                if service.state in ("failed", "draining"):
                    raise ValueError(f"engine: {service.problem or error}") from error
                await asyncio.sleep(PAUSE_S)
                while service.state == "ready" and service.room < body.n * body.num_prompts:
                    await asyncio.sleep(PAUSE_S)
