"""Choice of a fleet's replica for a request: the one whose cache has its beginning, unless that one is too busy.

Ray Serve calls it; extra `ray`. Rendezvous hashing (Thaler and Ravishankar 1998): each beginning ranks the replicas in
its own order, so that a replica that joins or leaves moves only the beginnings that it gets or had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

MOST_AHEAD = 8  # requests by which a request's own replica may be busier than the least busy one


def ranked(beginning: str, replicas: Sequence[str]) -> list[str]:
    """Rank replicas by name, the one that a beginning belongs to first."""
    return sorted(replicas, key=lambda name: hashlib.sha256(f"{beginning}\0{name}".encode()).digest())


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
        beginning = "" if pending_request is None else str(pending_request.kwargs.get("beginning", ""))
        names = ranked(beginning, list(by_name))
        busy = {name: self.replica_queue_len_cache.get(by_name[name].replica_id) or 0 for name in names}
        least = min(busy.values(), default=0)
        if names and busy[names[0]] > least + self._most_ahead:
            names.sort(key=busy.__getitem__)
        return [[by_name[name]] for name in names]
