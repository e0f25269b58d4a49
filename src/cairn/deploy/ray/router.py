"""Which replica gets a request: cairn's rule in Ray Serve's place for it."""

from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cairn.deploy.ray.fleet import Fleet
from cairn.deploy.ray.handles import RoutingHint


class PrefixRouter(RequestRouter):
    """Ray Serve makes one for each handle, and calls it in one event loop."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Ray's constructor of what is a router's own."""
        self._fleet = Fleet()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called with all replicas whenever one comes, goes, or tells something new of itself."""
        self._fleet.update({replica.replica_id.unique_id: replica.routing_stats for replica in replicas})
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One list a replica, best first."""
        wanted = _hint_of(pending_request).destination
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[names[name]] for name in self._fleet.rank(wanted.request, list(names), wanted.tried, wanted.owner)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """A replica has taken the request."""
        hint, name = _hint_of(pending_request), replica_id.unique_id
        request_id = pending_request.metadata.internal_request_id
        self._fleet.record_routed(request_id, hint.destination.request, name)
        loop = self._event_loop
        hint.on_routed(name, lambda: loop.call_soon_threadsafe(self._fleet.record_prefilled, request_id, name))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """From any thread."""
        name = replica_id.unique_id
        self._event_loop.call_soon_threadsafe(self._fleet.record_finished, internal_request_id, name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Before Ray's controller has found out."""
        super().on_replica_actor_died(replica_id)
        self._fleet.remove(replica_id.unique_id)


def _hint_of(pending_request: PendingRequest | None) -> RoutingHint:
    """The second argument of the call."""
    if pending_request is None or len(pending_request.args) < 2:
        return RoutingHint()
    hint = pending_request.args[1]
    return hint if isinstance(hint, RoutingHint) else RoutingHint()
