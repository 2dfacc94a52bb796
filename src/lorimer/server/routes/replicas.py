"""The replicas of base models: which process computes each, how busy it is, and which of the caller's runs moved.

Other users' runs are shown only as totals.
"""

from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response

from lorimer.scheduler.stats import ReplicaStatus
from lorimer.server.context import context_of, user_of
from lorimer.server.openapi import Endpoint
from lorimer.server.roles import node_name
from lorimer.server.routes.replies import reply
from lorimer.server.system import resident_bytes
from lorimer.store import moves
from lorimer.types.overview import TokensPerSecond
from lorimer.types.replicas import ReplicaEntry, ReplicasResponse, RunMove

OWNER_CHARS = 8
"""Of an owner's id that are shown."""
NUM_MOVES, MOVES_PERIOD = 20, timedelta(days=1)


async def get_replicas(request: Request) -> Response:
    """Return the replicas of all base models with their owners and load, and the latest moves of the caller's runs."""
    context, user = context_of(request), user_of(request)
    found = await context.store.read(moves.recent, user.user_id, context.now() - MOVES_PERIOD, NUM_MOVES)
    node = node_name(context.settings)
    return reply(
        ReplicasResponse(
            replicas=[replica_entry(replica, node) for replica in context.scheduler.replica_states()],
            moves=[
                RunMove(at=move.at, run_id=move.model_id, from_replica=move.from_replica, to_replica=move.to_replica)
                for move in found
            ],
        )
    )


def replica_entry(replica: ReplicaStatus, own_node: str) -> ReplicaEntry:
    model, owner_id = replica.model, replica.owner_id
    return ReplicaEntry(
        name=model.replica,
        base_model=model.name,
        state=replica.state,
        stage=model.stage,
        error=model.error or None,
        owner_id=owner_id and owner_id[:OWNER_CHARS],
        node=(replica.node or own_node) if owner_id else None,
        changed_at=replica.changed_at,
        lease_seconds=replica.lease_seconds,
        num_loaded_runs=model.num_loaded_runs,
        num_waiting_samples=model.num_waiting_samples,
        num_running_samples=model.num_running_samples,
        num_open_operations=model.num_open_operations,
        tokens_per_second=TokensPerSecond(training=model.training_rate, sampling=model.sampling_rate),
        engine_bytes=resident_bytes(model.pids),
        num_deaths=model.num_deaths,
    )


ROUTES = [Endpoint("GET", "/api/v1/replicas", get_replicas, answer=ReplicasResponse)]
