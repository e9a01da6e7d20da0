"""Watermark detection on files of texts, in background jobs of a server (S file; extra `serve`).

POST /v1/watermark/jobs takes lines of JSON and answers with a job; GET returns its state and its scores; DELETE ends
it. A job is `watermark.py identify` on the job's own folder, run by the workers of `jobs.py work`: this server's, at
the lowest CPU priority, or those of machines that share the folder. Server and workers may end and start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from jaxbench import outputs
from jaxbench.jobs import work
from jaxbench.jobs.queue import COMMANDS, ENDED, HERE, Entry, Queue
from jaxbench.measure import process
from jaxbench.serve import intake
from jaxbench.serve.intake import Bad
from jaxbench.serve.service import Refused, Service
from jaxbench.serve.settings import ServerConfig

INPUT, SCORES, WATERMARKS = "texts.jsonl", "scores.jsonl", "watermarks.yaml"
PATH, ONE, RESULT = "/v1/watermark/jobs", "/v1/watermark/jobs/{job}", "/v1/watermark/jobs/{job}/scores"
GRACE_S = 15.0  # for workers to stop what they run
KIND = "watermarks"  # of the jobs that clients may see: others may share the queue
RECEIVED = ".received-"  # prefix of the folders of bodies that are being received
OLD_S = 86_400  # seconds after which nobody waits for such a folder any more


class Workers:
    """The process that runs this server's workers."""

    def __init__(self, config: ServerConfig):
        """Start it, if the configuration names a queue and workers."""
        self._process = None
        _sweep(config.jobs.folder)
        if config.jobs.folder is None or not config.jobs.workers:
            return
        words = [
            str(COMMANDS / "jobs.py"), "work", f"--queue={config.jobs.folder}", "--nice=19",
            f"--workers={config.jobs.workers}", f"--keep_days={config.jobs.keep_days}",
        ]  # fmt: skip
        self._process = subprocess.Popen(work.tied(words), stdin=subprocess.DEVNULL, start_new_session=True)

    def end(self) -> None:
        """End it; interrupted jobs wait for the next process."""
        if self._process is not None:
            process.end(self._process, grace_s=GRACE_S)


def _sweep(folder: str | None) -> None:
    """Remove old folders of bodies that killed servers had begun to receive."""
    for path in Path(folder).glob(f"{RECEIVED}*") if folder is not None else ():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - OLD_S:
                shutil.rmtree(path)


def counted(config: ServerConfig) -> dict[str, int]:
    """Count the jobs of clients in each state."""
    counts = dict.fromkeys(("waiting", "running", *ENDED), 0) if config.jobs.folder is not None else {}
    for entry in _own(Queue(config.jobs.folder)) if counts else ():
        counts[entry.progress.state] += 1
    return counts


def _own(held: Queue) -> list[Entry]:
    return [entry for entry in held.entries() if entry.job.kind == KIND]


def _queue(request: Request) -> tuple[Queue, Service, ServerConfig]:
    """Return the queue, the service and the configuration that a request works on.

    Raises:
      Bad: the server has no queue, or no watermarks.
    """
    config, service = request.app.state.config, request.app.state.service
    path = request.scope["path"][:100]
    if config.jobs.folder is None:
        raise Bad(f"{path}: the server has no queue; name a folder as jobs.folder in its configuration", 404)
    if service.watermarks is None:
        raise Bad(f"{path}: the server has no watermarks; name some in its configuration", 404)
    return Queue(config.jobs.folder), service, config


async def submit(request: Request) -> Response:
    """Take a file of texts: lines of {"text": a string or token ids, "id": .., "prompt_tokens": ..}."""
    held, service, config = _queue(request)
    service.check_ready()
    query = request.query_params
    if unknown := [name for name in query if name != "watermarks"]:
        raise Bad(f"?{unknown[0][:60]!a} is not served here; wanted ?watermarks=NAME,NAME", param=unknown[0][:60])
    given = [name for names in query.getlist("watermarks") for name in names.split(",")]
    names = list(dict.fromkeys(given)) if "watermarks" in query else list(service.finder.names)
    if odd := [name for name in names if name not in service.finder.names]:
        raise Bad(f"watermarks: {odd[0][:60]!r} is unknown here; wanted some of {', '.join(service.finder.names)}")
    entries = await asyncio.to_thread(_own, held)
    if sum(entry.progress.state not in ENDED for entry in entries) >= config.jobs.max_waiting:
        raise Refused(429, f"{config.jobs.max_waiting} jobs have not ended; try again later")
    held.folder.mkdir(parents=True, exist_ok=True)
    received = Path(tempfile.mkdtemp(prefix=RECEIVED, dir=held.folder))
    try:
        await _receive(request, received / INPUT, config.jobs.max_bytes)
        entry = await asyncio.to_thread(_submitted, held, received, service, config, names)
    finally:
        shutil.rmtree(received, ignore_errors=True)
    return JSONResponse(_shown(entry), 202, {"Location": f"{PATH}/{entry.job.id}"})


async def _receive(request: Request, path: Path, most: int) -> None:
    """Write a body to a file.

    Raises:
      Bad: it is empty, or larger than `most` bytes.
    """
    size = 0
    with open(path, "wb") as file:
        async for chunk in intake.chunks(request, most):
            size += await asyncio.to_thread(file.write, chunk)
    if not size:
        raise Bad(f"the body has {size} bytes; wanted lines of JSON, each with a text")


def _submitted(held: Queue, received: Path, service: Service, config: ServerConfig, names: list[str]) -> Entry:
    words = [
        str(COMMANDS / "watermark.py"), "identify", "--backend=numpy", f"--watermarks={WATERMARKS}",
        f"--input={INPUT}", f"--output={SCORES}", "--prompt_field=prompt_tokens",
        f"--vocab_size={service.about['vocab_size']}",
    ]  # fmt: skip
    if (model := config.engine.model) is not None:
        words.append(f"--model={Path(model).absolute() if Path(model).exists() else model}")
    words += [f"--score_cache={config.result_cache.url}"] if config.result_cache.url else []
    watermarks = service.watermarks.described(names)
    for fields in watermarks.values():
        if fields.get("key_file"):
            fields["key_file"] = os.path.abspath(fields["key_file"])

    def fill(folder: Path) -> None:
        os.rename(received / INPUT, folder / INPUT)
        outputs.write_text(folder / WATERMARKS, yaml.safe_dump(watermarks))

    return held.submit(words, title=f"watermarks {','.join(names)}", fill=fill, cwd=HERE, kind=KIND)


def _found(held: Queue, request: Request) -> Entry:
    """Return the job that a request names.

    Raises:
      Bad: there is none.
    """
    id = request.path_params["job"]
    with contextlib.suppress(ValueError, OSError):
        entry = held.find(id)
        if entry.job.kind == KIND:
            return entry
    raise Bad(f"job {id[:60]!r} is not here", 404)


async def show_all(request: Request) -> Response:
    """List all jobs, the oldest first."""
    held, _, _ = _queue(request)
    shown = await asyncio.to_thread(lambda: [_shown(entry) for entry in _own(held)])
    return JSONResponse({"object": "list", "data": shown})


async def show(request: Request) -> Response:
    """Show one job."""
    return JSONResponse(_shown(_found(_queue(request)[0], request)))


async def scores(request: Request) -> Response:
    """Return the scores of a job, one line of JSON per text."""
    entry = _found(_queue(request)[0], request)
    if entry.progress.state != "done":
        raise Bad(f"job {entry.job.id} is {entry.progress.state}; its scores are there when it is done", 409)
    return FileResponse(entry.folder / SCORES, media_type="application/x-ndjson")


async def remove(request: Request) -> Response:
    """Cancel a job that has not ended, or remove one that has."""
    held = _queue(request)[0]
    entry = _found(held, request)
    try:
        if entry.progress.state in ENDED:
            held.remove(entry.job.id)
            return Response(status_code=204)
        return JSONResponse(_shown(held.cancel(entry.job.id)), 202)
    except (ValueError, OSError) as error:  # it ended meanwhile, or another client removed it
        raise Bad(str(error), 409) from error


def _shown(entry: Entry) -> dict[str, Any]:
    """Describe a job as clients read it, without its folder or command line."""
    progress = entry.progress
    shown: dict[str, Any] = {
        "id": entry.job.id, "object": "watermark.job", "status": progress.state, "created": int(entry.job.submitted),
        "attempts": progress.attempts,
    }  # fmt: skip
    if progress.state == "done":
        shown |= {"scores": f"{PATH}/{entry.job.id}/scores"} | _counted(entry.folder)
    if progress.state == "failed":
        shown["error"] = progress.note
    return shown


def _counted(folder: Path) -> Mapping[str, Any]:
    try:
        report = outputs.read_json(folder / f"{SCORES}.report.json")
    except ValueError:  # another client removed the job meanwhile
        return {}
    bad = [{"line": line, "problem": problem} for _, line, problem in report["first_bad"]]
    return {"texts": report["texts"], "tokens": report["tokens"], "bad_lines": report["bad"], "first_bad": bad[:20]}
