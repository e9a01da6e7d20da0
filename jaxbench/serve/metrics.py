"""The server's metrics, for Prometheus (S file; extra `serve`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
PREFIX = "jaxbench_serve_"
GAUGES = {
    "running": "requests that are computed", "waiting": "requests that wait", "blocks": "blocks of the cache",
    "blocks_available": "blocks that nobody reads", "blocks_known": "blocks whose text is known",
    "preempted": "requests that lost their blocks, since the engine's start", "steps": "since the engine's start",
    "guessed": "tokens that were guessed, since the engine's start", "guessed_right": "of these, those that were right",
}  # fmt: skip


class Usage(NamedTuple):
    """What a process takes of the machine."""

    resident_bytes: int
    cpu_seconds: float  # of all its threads, since it began


def usage(pid: int | None) -> Usage:
    """Read what a process takes now; zeros where there is none of this number, or None."""
    try:
        process = psutil.Process(-1 if pid is None else pid)
        times = process.cpu_times()
        return Usage(process.memory_info().rss, times.user + times.system)
    except (psutil.Error, ValueError):  # ValueError: a negative number
        return Usage(0, 0.0)


class Metrics:
    """Counters, histograms and gauges of one server, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        options = {"registry": self._registry}
        self._gauges = {name: Gauge(PREFIX + name, about, **options) for name, about in GAUGES.items()}
        self._deaths = Counter(PREFIX + "worker_deaths", "workers that ended unasked", **options)
        self._http = Counter(PREFIX + "http_requests", "by path and status", ["path", "status"], **options)
        self._answers = Counter(PREFIX + "answers", "by the way they ended", ["ended"], **options)
        self._prompt = Counter(PREFIX + "prompt_tokens", "of answered requests", **options)
        self._cached = Counter(PREFIX + "cached_tokens", "of these, found in the cache", **options)
        self._tokens = Counter(PREFIX + "tokens", "generated", **options)
        times = {"buckets": SECONDS, **options}
        self._first = Histogram(PREFIX + "first_token_seconds", "from the request to its first token", **times)
        self._between = Histogram(PREFIX + "between_tokens_seconds", "from a token to the next", **times)
        self._texts = Counter(PREFIX + "detected_texts", "in which watermarks were looked for", ["cached"], **options)
        self._detect = Histogram(PREFIX + "detect_seconds", "of such a text", **times)
        self._jobs = Gauge(PREFIX + "jobs", "of the queue, by state", ["state"], **options)
        self._rules = Gauge(PREFIX + "rule_broken", "1 while it is", ["rule"], **options)
        self._resident = Gauge(PREFIX + "resident_memory_bytes", "of a process", ["process"], **options)
        self._cpu = Gauge(PREFIX + "cpu_seconds", "of a process, since it began", ["process"], **options)
        self._whole = Histogram(PREFIX + "answer_seconds", "from the request to its end", **times)

    def engine(self, stats: Mapping[str, Any]) -> None:
        """Set the gauges from Engine.stats."""
        for name, gauge in self._gauges.items():
            gauge.set(stats[name])

    def token(self, seconds: float, *, is_first: bool) -> None:
        """Count a token that came `seconds` after the one before it, or after the request."""
        self._tokens.inc()
        (self._first if is_first else self._between).observe(seconds)

    def cancelled(self) -> None:
        """Count a cancelled answer, but neither its time nor its prompt, which say nothing about the server."""
        self._answers.labels("cancelled").inc()

    def answered(self, ended: str, prompt: int, cached: int, seconds: float) -> None:
        """Record an answer that ended."""
        self._answers.labels(ended).inc()
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._whole.observe(seconds)

    def http(self, path: str, status: int) -> None:
        """Count a response; path: of a route, not text that a client made up."""
        self._http.labels(path, str(status)).inc()

    def detected(self, seconds: float, *, is_cached: bool) -> None:
        """Record a text that was checked for watermarks."""
        self._texts.labels(str(is_cached).lower()).inc()
        self._detect.observe(seconds)

    def jobs(self, counts: Mapping[str, int]) -> None:
        """Set the number of the queue's jobs in each state."""
        for state, count in counts.items():
            self._jobs.labels(state).set(count)

    def rules(self, is_broken: Mapping[str, bool]) -> None:
        """Set which rules are broken."""
        for name, value in is_broken.items():
            self._rules.labels(name).set(value)

    def processes(self, used: Mapping[str, Usage]) -> None:
        """Set what each process takes, by its name."""
        for name, each in used.items():
            self._resident.labels(name).set(each.resident_bytes)
            self._cpu.labels(name).set(each.cpu_seconds)

    def worker_died(self) -> None:
        """Count a death of the engine's process, and set the gauges: an engine that is gone runs and holds nothing."""
        self._deaths.inc()
        self.engine(dict.fromkeys(GAUGES, 0))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's format."""
        return generate_latest(self._registry)
