"""Choice of a fleet's replica for a request: the one whose cache has its beginning, unless that one is too busy.

Ray Serve calls it; extra `ray`. Rendezvous hashing (Thaler and Ravishankar 1998): each beginning ranks the replicas in
its own order, so that a replica that joins or leaves moves only the beginnings that it gets or had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

MOST_AHEAD = 8  # requests by which a request's own replica may be busier than the least busy one


def ranked(beginning: str, replicas: Sequence[str]) -> list[str]:
    """Rank replicas by name, the one that a beginning belongs to first.

    A beginning may have a lone surrogate, which its replica refuses; an error here would never reach the client.
    """
    key = beginning.encode(errors="surrogatepass") + b"\0"
    return sorted(replicas, key=lambda name: hashlib.sha256(key + name.encode()).digest())


def order(beginning: str, busy: Mapping[str, int], *, excluded: Collection[str], most_ahead: int) -> list[str]:
    """Return replicas in the order in which a request is offered to them; busy: each one's number of requests.

    excluded: replicas that have refused it; the others are then asked in order of load.
    """
    names = ranked(beginning, [name for name in busy if name not in excluded] or list(busy))
    if excluded or (names and busy[names[0]] > min(busy.values()) + most_ahead):
        names.sort(key=busy.__getitem__)
    return names


class PrefixRouter(RequestRouter):
    """Sends requests that begin alike to the same replica."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Read the option `most_ahead`."""
        self._most_ahead = int(kwargs.get("most_ahead", MOST_AHEAD))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are tried."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        given = {} if pending_request is None else pending_request.kwargs
        busy = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        beginning, excluded = str(given.get("beginning", "")), given.get("excluded", ())
        names = order(beginning, busy, excluded=excluded, most_ahead=self._most_ahead)
        return [[by_name[name]] for name in names]
