"""Ray Serve's side of prefix-affine routing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from examples.ray_serve.prefix import rank


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way to a replica. ``avoid``: unique ids of replicas that could not answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    prefix: str
    avoid: frozenset[str] = frozenset()

    def avoiding(self, replica: str) -> Call:
        return replace(self, avoid=self.avoid | {replica})


class PrefixRouter(RequestRouter):
    """Routes a ``Call``, the first argument of each request, by ``rank``. A replica that takes no more requests
    (``max_ongoing_requests``) is passed over for the next one."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = (
            True  # when all are full: else Serve asks without a pause
        )
        call: Call = pending_request.args[0]
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in replicas.items()
        }
        return [[replicas[name]] for name in rank(call.prefix, loads, call.avoid)]
