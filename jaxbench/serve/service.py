"""The layer between HTTP interface and engine: admission of requests, answers in text as they come (S file).

Everything here runs in the server's event loop, which also receives the reports of the engine's worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jaxbench.generation.pieces import Text
from jaxbench.serve import constraint
from jaxbench.serve.engine import Event
from jaxbench.serve.marking import Finder, Watermarks
from jaxbench.serve.metrics import Metrics, Usage, usage
from jaxbench.serve.request import Request, TokenLogprobs
from jaxbench.serve.settings import ServerConfig
from jaxbench.serve.watch import Incident, Messenger, Watch
from jaxbench.serve.worker import Report, Supervisor

log = logging.getLogger("jaxbench.serve")

_LEVELS = {"open": logging.WARNING, "over": logging.INFO}
RETRY_S = 1  # seconds that a refused client is asked to wait


class Refused(Exception):
    """A request that is refused for now; status: HTTP's."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    ended: str | None = None  # stop | length | timeout | cancelled | error
    error: str | None = None


class Answer:
    """One answer in progress: events go in, pieces of text come out."""

    def __init__(self, request: Request, tokenizer: Any, *, prompt: Sequence[int] = ()):
        """prompt: token ids whose text the answer continues; () = the answer stands by itself."""
        self.request, self.asked = request, time.monotonic()
        end = types.SimpleNamespace(core=tokenizer.core, decode=tokenizer.decode, end_ids=request.end_ids)
        self._text = Text(end, request.stop, prompt=prompt)
        self.ids: list[int] = []
        self.num_cached = 0
        self.ended: str | None = None
        # takes each part of its text; True: it ends there, as if by a stop string, since what follows is not wanted
        self.is_over: Callable[[str], bool] | None = None
        self.is_refused = False  # it ended with an error of the request, not of the server
        self.last: float | None = None  # when its last token came
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()

    @property
    def goes_on(self) -> bool:
        """True where its text continues the prompt's."""
        return self._text.goes_on

    def take(self, event: Event) -> None:
        """Process an event of the request."""
        if self.ended:
            return
        self.num_cached, tokens, text = event.num_cached, (), ""
        logprobs = () if event.logprobs is None else (event.logprobs,)
        if event.token is not None:
            self.ids.append(event.token)
            tokens = (event.token,)
        if event.token is not None or event.ended:
            text = self._text.update(self.ids, is_full=event.ended is not None)
        ended = {"deadline": "timeout"}.get(event.ended, event.ended)
        if self._text.ended == "stop" and ended in (None, "length", "stop"):
            ended = "stop"
        if ended is None and self.is_over is not None and self.is_over(text):
            ended = "stop"
        of_grammar = constraint.told(event.error)
        self.ended, self.is_refused = ended, of_grammar is not None
        self.pieces.put_nowait(Piece(text, tokens, logprobs, ended, of_grammar or event.error))

    def end(self, ended: str, error: str | None = None) -> None:
        """End the answer from the server's side, with a last piece for its reader."""
        if not self.ended:
            self.ended = ended
            self.pieces.put_nowait(Piece("", ended=ended, error=error))


def are_refused(answers: Sequence[Answer]) -> bool:
    """True where every error that ended one of the answers is of its request, and none of the server."""
    return all(answer.is_refused for answer in answers if answer.ended == "error")


class Service:
    """Answers in progress, and the worker that computes them."""

    def __init__(self, config: ServerConfig, tokenizer: Any, watermarks: Watermarks | None = None):
        self.config, self.tokenizer, self.watermarks = config, tokenizer, watermarks
        self.state: Literal["loading", "ready", "draining", "failed"] = "loading"
        self.about: dict[str, Any] = {}  # of the model, once it is loaded; kept while it is loaded again
        self.progress: dict[str, Any] = {}  # of its loading: done, total
        self.problem = ""  # why the last worker ended
        self.answers: dict[str, Answer] = {}
        self.finder: Finder | None = None  # of watermarks, once the model is loaded
        self.metrics = Metrics()
        self.watch = Watch(config.alerts.rules)
        self._incidents: asyncio.Queue[Incident] = asyncio.Queue()
        self._watching = [asyncio.ensure_future(self._judge())] if config.alerts.rules else []
        if config.alerts.send is not None:
            self._watching.append(asyncio.ensure_future(self._tell(Messenger(config.alerts.send))))
        self._ending: asyncio.Future[None] | None = None
        self._supervisor = Supervisor(config.engine, self._hear, asyncio.get_running_loop(), watermarks)

    def _hear(self, report: Report) -> None:
        if report.kind == "events":
            if report.about:
                self.metrics.engine(report.about)
                self.watch.observe("waiting", report.about["waiting"], time.monotonic())
            for event in report.events:
                self._happened_safely(event)
            return
        if report.kind == "ready":
            self.about, self.progress = report.about, {}
            if self.watermarks is not None and self.finder is None:
                cache = self.config.result_cache.open()
                self.finder = self.watermarks.finder(self.tokenizer, report.about["vocab_size"], cache)
            self.state = "ready" if self.state == "loading" else self.state
            log.info("ready", extra={"fields": report.about})
        elif report.kind in ("died", "failed"):
            self.state = "failed" if report.kind == "failed" else "loading" if self.state == "ready" else self.state
            self.problem = report.error
            self.metrics.worker_died()
            log.error("worker lost", extra={"fields": {"error": report.error, "requests": len(self.answers)}})
            for id in list(self.answers):
                self._happened(Event(id, None, None, "error", report.error))
        else:
            self.progress = report.about

    def _happened_safely(self, event: Event) -> None:
        """Call `_happened`; an exception ends this answer and no other."""
        try:
            self._happened(event)
        except Exception as error:
            log.error("answer failed", extra={"fields": {"request": event.id, "error": type(error).__name__}})
            if (answer := self.answers.pop(event.id, None)) is not None:
                answer.end("error", f"its text failed ({type(error).__name__})")
                self._supervisor.send("cancel", event.id)

    def _happened(self, event: Event) -> None:
        answer = self.answers.get(event.id)
        if answer is None:
            return
        now = time.monotonic()
        if event.token is not None:
            seconds, is_first = now - (answer.last or answer.asked), answer.last is None
            self.metrics.token(seconds, is_first=is_first)
            self.watch.observe("first_token_s" if is_first else "between_tokens_s", seconds, now)
            self.watch.observe("tokens_per_s", 1.0, now)
            answer.last = now
        answer.take(event)
        if answer.ended:
            del self.answers[event.id]
            is_first = answer.request.sampling.choice == 0  # first of its prompt, which is counted once, as in `usage`
            prompt, cached = (len(answer.request.prompt), answer.num_cached) if is_first else (0, 0)
            ended = "refused" if answer.is_refused else answer.ended
            self.metrics.answered(ended, prompt, cached, now - answer.asked)
            self.watch.observe("answer_s", now - answer.asked, now)
            if event.ended is None:  # a stop string or the last call that is taken, which the engine does not know
                self._supervisor.send("cancel", event.id)

    def check_ready(self) -> None:
        """Check that requests are accepted.

        Raises:
          Refused: they are not.
        """
        if self.state != "ready":
            raise Refused(503, {"draining": "the server is ending"}.get(self.state, f"the model is {self.state}"))

    @property
    def room(self) -> int:
        """Number of answers that it takes now, if it is ready."""
        return self.config.engine.limits.max_requests - len(self.answers)

    def submit(self, requests: Sequence[Request], *, go_on: bool) -> list[Answer]:
        """Hand requests to the engine.

        go_on: the answers' texts continue their prompts', unlike a chat message or an answer that follows a grammar.

        Raises:
          Refused: the engine is not ready, is ending, or is full.
        """
        self.check_ready()
        if len(requests) > self.room:
            count, most = len(self.answers), self.config.engine.limits.max_requests
            raise Refused(429, f"{count} answers are in progress, and {most} may be; try again later")
        made = [Answer(each, self.tokenizer, prompt=each.prompt if go_on else ()) for each in requests]
        for answer in made:
            self.answers[answer.request.id] = answer
            if not self._supervisor.send("add", answer.request):
                self.drop(made)
                raise Refused(503, "the engine is being started again")
        return made

    def drop(self, answers: Sequence[Answer]) -> None:
        """Cancel answers that nobody waits for any more."""
        for answer in answers:
            if self.answers.pop(answer.request.id, None) is not None:
                answer.end("cancelled")
                self._supervisor.send("cancel", answer.request.id)
                self.metrics.cancelled()

    def detected(self, seconds: float, *, is_cached: bool) -> None:
        """Record that a text was checked for watermarks."""
        now = time.monotonic()
        self.metrics.detected(seconds, is_cached=is_cached)
        self.watch.observe("detect_s", seconds, now)
        self.watch.observe("texts_per_s", 1.0, now)

    def usage(self) -> dict[str, Usage]:
        """Read what the server's process and its engine's take now."""
        engine = self._supervisor.process
        return {"server": usage(os.getpid()), "engine": usage(None if engine is None else engine.pid)}

    async def _judge(self) -> None:
        """Evaluate the alert rules until the server ends; log each incident, and queue it for `_tell`."""
        every, before = self.config.alerts.every_s, time.monotonic()
        while True:
            await asyncio.sleep(every)
            now = time.monotonic()
            if self.answers:
                self.watch.worked(now - before, now)
            before = now
            resident = sum(each.resident_bytes for each in self.usage().values())
            self.watch.observe("memory_mib", resident / 2**20, now)
            for incident in self.watch.judge(now):
                log.log(_LEVELS[incident.state], f"rule {incident.state}", extra={"fields": incident._asdict()})
                self._incidents.put_nowait(incident)
            self.metrics.rules(self.watch.is_broken)

    async def _tell(self, messenger: Messenger) -> None:
        """Send queued incidents in order until the server ends."""
        while True:
            incident = await self._incidents.get()
            for reason in await asyncio.to_thread(messenger.send, incident):
                log.error("alert was not sent", extra={"fields": {"incident": incident.id, "reason": reason}})

    async def end(self, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait up to drain_s for answers in progress, or until is_hurried returns true; then end the worker."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(is_hurried))
        await self._ending

    async def _end(self, is_hurried: Callable[[], bool]) -> None:
        self.state = "draining"
        for task in self._watching:
            task.cancel()
        until = time.monotonic() + self.config.drain_s
        while self.answers and time.monotonic() < until and not is_hurried():
            await asyncio.sleep(0.02)
        for id in list(self.answers):
            self._happened(Event(id, None, None, "error", "the server ended before the answer did"))
        await asyncio.to_thread(self._supervisor.end)
