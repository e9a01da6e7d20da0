"""Cache of small computed results: of the process itself, or shared through Redis (S file).

A name is the digest of everything that determines a result, so that a result never becomes stale and any process may
write it. A cache only saves time: if Redis cannot be reached, results are computed.
"""

from __future__ import annotations

import collections
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pydantic

from jaxbench.config import Base

log = logging.getLogger("jaxbench.result_cache")

PREFIX = b"jaxbench:1:"  # of names in Redis; a change of what is stored needs another number
PAUSE_S = 5.0  # until Redis is tried again, once it could not be reached
TIMEOUT_S = 0.5  # of one call: much more than a result costs, much less than a client waits
MANY = 4096  # names per call
PASSWORD_VARIABLE = "JAXBENCH_REDIS_PASSWORD"
SCHEMES = ("redis://", "rediss://", "unix://")


class ResultCacheConfig(Base):
    """Where results are stored."""

    model_config = pydantic.ConfigDict(hide_input_in_errors=True)

    entries: int = pydantic.Field(default=65_536, ge=0)  # in this process, the least recently used evicted; 0 = none
    url: str | None = None  # redis://HOST:PORT/NUMBER, rediss:// or unix://: shared by all processes that name it
    keep_s: int = pydantic.Field(default=7 * 86_400, ge=1)  # in Redis, since a result was written

    @pydantic.field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and (
            "@" in url or re.search("[?&](username|password)=", url)
        ):  # neither on a command line nor in a file
            raise ValueError(f"url holds a login (not shown); set {PASSWORD_VARIABLE}, and leave it out")
        if url is not None and not url.startswith(SCHEMES):
            begin = re.match("[a-z]*", url).group()[:20]
            raise ValueError(f"url begins with {begin!r}, wanted one of {', '.join(SCHEMES)}")
        return url

    def open(self) -> ResultCache:
        """Open the cache.

        Raises:
          ValueError: a Redis is named, and the package redis is missing or rejects its address.
        """
        layers: list[ResultCache] = [LocalCache(self.entries)] if self.entries else []
        return Layers([*layers, RedisCache(self.url, keep_s=self.keep_s)] if self.url else layers)


class ResultCache(Protocol):
    """Cache of results by name."""

    def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the result of each name, None if it is missing."""

    def write(self, results: Mapping[bytes, bytes]) -> None:
        """Store results."""


class LocalCache:
    """LRU cache of this process; thread-safe."""

    def __init__(self, entries: int):
        """Args: entries: kept at most, at least 1."""
        self._entries, self._held = entries, collections.OrderedDict[bytes, bytes]()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the result of each name, None if it is missing."""
        with self._lock:
            found = [self._held.get(name) for name in names]
            for name, result in zip(names, found, strict=True):
                if result is not None:
                    self._held.move_to_end(name)
        return found

    def write(self, results: Mapping[bytes, bytes]) -> None:
        """Store results."""
        with self._lock:
            self._held |= results
            while len(self._held) > self._entries:
                self._held.popitem(last=False)


class RedisCache:
    """Cache that processes and machines share. A failure is logged, and Redis not tried again for PAUSE_S."""

    def __init__(self, url: str, *, keep_s: int):
        """Args: keep_s: seconds until a result expires.

        Raises:
          ValueError: the package is missing, it rejects the address, or the address decodes results to text.
        """
        try:
            import redis
        except ImportError as error:
            raise ValueError(f"result cache: a Redis is named, and {error}; pip install -e '.[redis]'") from error
        how = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        how |= {"password": word} if (word := os.environ.get(PASSWORD_VARIABLE, "").strip()) else {}
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 1)  # a connection that the server closed meanwhile
        try:
            self._redis = redis.Redis.from_url(url, **how, retry=retry)
        except (ValueError, TypeError) as error:
            raise ValueError(f"result cache: {type(error).__name__} in the address of Redis (not shown)") from None
        if decoded := self._redis.connection_pool.connection_kwargs.get("decode_responses"):
            raise ValueError(f"result cache: the address of Redis has decode_responses={decoded}; results are bytes")
        self._keep_s, self._errors, self._until = keep_s, (redis.RedisError, OSError), 0.0

    def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the result of each name, None if it is missing or Redis cannot be reached."""
        found: list[bytes | None] = []
        for start in range(0, len(names), MANY):
            part = [PREFIX + name for name in names[start : start + MANY]]
            found += self._asked(lambda part=part: self._redis.mget(part), [None] * len(part))
        return found

    def write(self, results: Mapping[bytes, bytes]) -> None:
        """Store results."""
        items = list(results.items())
        for start in range(0, len(items), MANY):
            with self._redis.pipeline(transaction=False) as pipe:
                for name, result in items[start : start + MANY]:
                    pipe.set(PREFIX + name, result, ex=self._keep_s)
                self._asked(pipe.execute, None)

    def _asked(self, call: Any, without: Any) -> Any:
        if time.monotonic() < self._until:
            return without
        try:
            return call()
        except self._errors as error:
            self._until = time.monotonic() + PAUSE_S
            log.warning("redis is not there", extra={"fields": {"error": type(error).__name__}})
            return without


class Layers:
    """Caches in layers: a result found in a later one is written to those before it."""

    def __init__(self, layers: Sequence[ResultCache]):
        """Args: layers: nearest first; none = nothing is stored."""
        self._layers = tuple(layers)

    def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the result of each name, None if no layer has it."""
        found: dict[bytes, bytes] = {}
        for number, layer in enumerate(self._layers):
            wanted = [name for name in dict.fromkeys(names) if name not in found]
            if not wanted:
                break
            new = {name: result for name, result in zip(wanted, layer.read(wanted), strict=True) if result is not None}
            for before in self._layers[:number] if new else ():
                before.write(new)
            found |= new
        return [found.get(name) for name in names]

    def write(self, results: Mapping[bytes, bytes]) -> None:
        """Store results in every layer."""
        for layer in self._layers if results else ():
            layer.write(results)
