"""What the server keeps: runs, checkpoints, sessions and samplers. Needs no session.

Most methods give a future of ``concurrent.futures``; the twins ending in ``_async`` give the result itself.
"""

import asyncio
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Literal

from lorimer import types
from lorimer.client.admin import AdminClient
from lorimer.client.auth import claims_of
from lorimer.client.episodes import EpisodesClient
from lorimer.client.errors import ExperimentalWarning, TinkerError
from lorimer.client.evaluations import EvaluationsClient
from lorimer.client.futures import APIFuture, AwaitableConcurrentFuture
from lorimer.client.metrics import metrics_path, read_metrics
from lorimer.client.rollouts import RolloutsClient
from lorimer.client.runs import RunsClient
from lorimer.client.trainings import TrainingsClient
from lorimer.client.transport import parse
from lorimer.types.metrics import RunMetricsResponse
from lorimer.types.replicas import ReplicasResponse

AccessScope = Literal["owned", "accessible"]

TRACE_POLL_SECONDS = 5.0
ARCHIVE_LIFETIME = timedelta(minutes=15)


def _checkpoint_path(tinker_path: str) -> str:
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return f"/training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}"


class RestClient(AdminClient, RunsClient, RolloutsClient, EvaluationsClient, TrainingsClient, EpisodesClient):
    # ── runs ──────────────────────────────────────────────────────────────────────────────────────────

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> "Future[types.TrainingRun]":
        path = f"/training_runs/{training_run_id}"
        return self._start("get_training_run", types.TrainingRun, "GET", path, query={"access_scope": access_scope})

    async def get_training_run_async(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        return await self._wait(self.get_training_run(training_run_id, access_scope))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> "Future[types.TrainingRun]":
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        return self.get_training_run(parsed.training_run_id, access_scope)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        return await self._wait(self.get_training_run_by_tinker_path(tinker_path, access_scope))

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> "Future[types.TrainingRunsResponse]":
        query = {"limit": limit, "offset": offset, "access_scope": access_scope, "project_id": project_id}
        return self._start("list_training_runs", types.TrainingRunsResponse, "GET", "/training_runs", query=query)

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> types.TrainingRunsResponse:
        return await self._wait(self.list_training_runs(limit, offset, access_scope, project_id))

    def get_metrics(
        self,
        training_run_id: types.ModelID,
        names: Sequence[str] | None = None,
        *,
        after: str | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        max_points: int | None = None,
    ) -> "Future[RunMetricsResponse]":
        """Every point of a run's metrics, or of those called ``names``; ours alone.

        With the ``cursor`` of an earlier answer as ``after``, only what is new or was written again since. A series of
        more than ``max_points`` is thinned by the server: of every ``steps_per_bucket`` steps it gives the first, last,
        least, greatest and first not finite point.
        """
        chosen = {"first_step": first_step, "last_step": last_step, "max_points": max_points}
        return self._connection.loop.run(
            read_metrics(self._connection, metrics_path(training_run_id), names, after, **chosen)
        )

    async def get_metrics_async(
        self,
        training_run_id: types.ModelID,
        names: Sequence[str] | None = None,
        *,
        after: str | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        max_points: int | None = None,
    ) -> RunMetricsResponse:
        chosen = {"first_step": first_step, "last_step": last_step, "max_points": max_points}
        return await self._wait(self.get_metrics(training_run_id, names, after=after, **chosen))

    def list_replicas(self) -> "Future[ReplicasResponse]":
        """The replicas of the base models, who computes them, and recent moves of the user's runs; ours alone."""
        return self._start("list_replicas", ReplicasResponse, "GET", "/replicas")

    async def list_replicas_async(self) -> ReplicasResponse:
        return await self._wait(self.list_replicas())

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────────

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[types.WeightsInfoResponse]:
        """The base model and the shape of a checkpoint."""
        body = types.WeightsInfoRequest(tinker_path=tinker_path)
        return AwaitableConcurrentFuture(
            self._start("get_weights_info_by_tinker_path", types.WeightsInfoResponse, "POST", "/weights_info", body)
        )

    def list_checkpoints(self, training_run_id: types.ModelID) -> "Future[types.CheckpointsListResponse]":
        path = f"/training_runs/{training_run_id}/checkpoints"
        return self._start("list_checkpoints", types.CheckpointsListResponse, "GET", path)

    async def list_checkpoints_async(self, training_run_id: types.ModelID) -> types.CheckpointsListResponse:
        return await self._wait(self.list_checkpoints(training_run_id))

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> "Future[types.CheckpointsListResponse]":
        query = {"limit": limit, "offset": offset}
        return self._start("list_user_checkpoints", types.CheckpointsListResponse, "GET", "/checkpoints", query=query)

    async def list_user_checkpoints_async(self, limit: int = 100, offset: int = 0) -> types.CheckpointsListResponse:
        return await self._wait(self.list_user_checkpoints(limit, offset))

    def delete_checkpoint(self, training_run_id: types.ModelID, checkpoint_id: str) -> "Future[None]":
        return self._do("delete_checkpoint", "DELETE", f"/training_runs/{training_run_id}/checkpoints/{checkpoint_id}")

    async def delete_checkpoint_async(self, training_run_id: types.ModelID, checkpoint_id: str) -> None:
        await self._wait(self.delete_checkpoint(training_run_id, checkpoint_id))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> "Future[None]":
        return self._do("delete_checkpoint_from_tinker_path", "DELETE", _checkpoint_path(tinker_path))

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self._wait(self.delete_checkpoint_from_tinker_path(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> "Future[None]":
        """Let everybody load it."""
        path = f"{_checkpoint_path(tinker_path)}/publish"
        return self._do("publish_checkpoint_from_tinker_path", "POST", path)

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self._wait(self.publish_checkpoint_from_tinker_path(tinker_path))

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> "Future[None]":
        path = f"{_checkpoint_path(tinker_path)}/publish"
        return self._do("unpublish_checkpoint_from_tinker_path", "DELETE", path)

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self._wait(self.unpublish_checkpoint_from_tinker_path(tinker_path))

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> "Future[None]":
        """Keep it for so long from now, or for ever."""
        path = f"{_checkpoint_path(tinker_path)}/ttl"
        return self._do("set_checkpoint_ttl_from_tinker_path", "PUT", path, {"ttl_seconds": ttl_seconds})

    async def set_checkpoint_ttl_from_tinker_path_async(self, tinker_path: str, ttl_seconds: int | None) -> None:
        await self._wait(self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds))

    def get_external_weights_urls(self, tinker_path: str) -> "Future[types.ExternalWeightsUrlsResponse]":
        """Where the files of an export are downloaded from."""
        if types.ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).checkpoint_type != "external":
            raise ValueError(f"{tinker_path!r} is no export; paths with /external_weights/ are accepted")
        path = f"{_checkpoint_path(tinker_path)}/external_weights_urls"
        return self._start("get_external_weights_urls", types.ExternalWeightsUrlsResponse, "GET", path)

    async def get_external_weights_urls_async(self, tinker_path: str) -> types.ExternalWeightsUrlsResponse:
        return await self._wait(self.get_external_weights_urls(tinker_path))

    def get_checkpoint_archive_url(
        self, training_run_id: types.ModelID, checkpoint_id: str
    ) -> "Future[types.CheckpointArchiveUrlResponse]":
        """Where one archive of a checkpoint's adapter is downloaded from, as in official releases up to 0.35."""
        path = f"/training_runs/{training_run_id}/checkpoints/{checkpoint_id}"
        return self._connection.loop.run(self._archive_url("get_checkpoint_archive_url", path))

    async def get_checkpoint_archive_url_async(
        self, training_run_id: types.ModelID, checkpoint_id: str
    ) -> types.CheckpointArchiveUrlResponse:
        return await self._wait(self.get_checkpoint_archive_url(training_run_id, checkpoint_id))

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> "Future[types.CheckpointArchiveUrlResponse]":
        path = _checkpoint_path(tinker_path)
        return self._connection.loop.run(self._archive_url("get_checkpoint_archive_url_from_tinker_path", path))

    async def get_checkpoint_archive_url_from_tinker_path_async(
        self, tinker_path: str
    ) -> types.CheckpointArchiveUrlResponse:
        return await self._wait(self.get_checkpoint_archive_url_from_tinker_path(tinker_path))

    async def _archive_url(self, name: str, checkpoint: str) -> types.CheckpointArchiveUrlResponse:
        answer = await self._send(name, "GET", f"{checkpoint}/archive", follow_redirects=False)
        if not answer.has_redirect_location:
            return parse(types.CheckpointArchiveUrlResponse, answer)
        try:
            expires = parsedate_to_datetime(answer.headers["expires"]).astimezone(UTC)
        except (KeyError, ValueError):
            # A server that says nothing else keeps an address for this long.
            expires = datetime.now(UTC) + ARCHIVE_LIFETIME
        return types.CheckpointArchiveUrlResponse(url=answer.headers["location"], expires=expires)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> AwaitableConcurrentFuture[str]:
        """Copy a checkpoint into a project; the path of the copy."""
        project = destination_project_id or os.environ.get("TINKER_PROJECT_ID")
        if not project:
            raise ValueError("destination_project_id is not given, and TINKER_PROJECT_ID is not set; one is needed")
        body = types.CopyWeightsRequest(source_path=path, destination_project_id=project, ttl_seconds=ttl_seconds)
        headers = {"X-Tinker-Weights-Access-Token": weights_access_token} if weights_access_token else None
        copied = self._start("copy_weights", types.CopyWeightsResponse, "POST", "/copy_weights", body, headers=headers)

        async def copy_path() -> str:
            return (await asyncio.wrap_future(copied)).tinker_path

        return self._connection.run(copy_path())

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        return await self.copy_weights(
            path, destination_project_id, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    # ── sessions and samplers ─────────────────────────────────────────────────────────────────────────

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> "Future[types.GetSessionResponse]":
        path, query = f"/sessions/{session_id}", {"access_scope": access_scope}
        return self._start("get_session", types.GetSessionResponse, "GET", path, query=query)

    async def get_session_async(self, session_id: str, access_scope: AccessScope = "owned") -> types.GetSessionResponse:
        return await self._wait(self.get_session(session_id, access_scope))

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> "Future[types.ListSessionsResponse]":
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._start("list_sessions", types.ListSessionsResponse, "GET", "/sessions", query=query)

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> types.ListSessionsResponse:
        return await self._wait(self.list_sessions(limit, offset, access_scope))

    def search_sessions(self, request: types.SessionSearchRequest) -> "Future[types.SessionSearchResponse]":
        """Sessions by name, metadata, owner and status; may change in any release."""
        warnings.warn("search_sessions may change in any release", ExperimentalWarning, stacklevel=2)
        return self._start("search_sessions", types.SessionSearchResponse, "POST", "/sessions/search", request)

    async def search_sessions_async(self, request: types.SessionSearchRequest) -> types.SessionSearchResponse:
        return await self._wait(self.search_sessions(request))

    def assign_session_project(self, session_id: str, project_id: str) -> "Future[None]":
        body = types.AssignProjectRequest(project_id=project_id)
        return self._do("assign_session_project", "PUT", f"/sessions/{session_id}/project", body)

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        await self._wait(self.assign_session_project(session_id, project_id))

    def export_session_trace(self, session_id: str) -> "Future[str]":
        """The address of a file with all that a session did, once the server has written it."""

        async def export() -> str:
            path = f"/api/v1/sessions/{session_id}/trace_export"
            while True:
                answer = await self._connection.transport.ask(types.TraceExportResponse, "GET", path)
                if answer.status == "ready" and answer.url is not None:
                    return answer.url
                if answer.status == "failed":
                    raise RuntimeError(f"the trace of session {session_id} cannot be exported: {answer.error}")
                await asyncio.sleep(TRACE_POLL_SECONDS)

        return self._connection.loop.run(export())

    async def export_session_trace_async(self, session_id: str) -> str:
        return await self._wait(self.export_session_trace(session_id))

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        return AwaitableConcurrentFuture(
            self._start("get_sampler", types.GetSamplerResponse, "GET", f"/samplers/{sampler_id}")
        )

    async def get_sampler_async(self, sampler_id: str) -> types.GetSamplerResponse:
        return await self.get_sampler(sampler_id)

    def whoami(self) -> APIFuture[types.WhoamiResponse]:
        """Whose key this is, from a token that the server gives for it."""

        async def ask() -> types.WhoamiResponse:
            answer = await self._connection.transport.ask(types.AuthTokenResponse, "POST", "/api/v1/auth/token", {})
            claims = claims_of(answer.jwt)
            try:
                return types.WhoamiResponse(
                    user_urn=claims["sub"],
                    org_urn=f"tml:organization:{claims['org_id']}",
                    email=claims.get("email") or None,
                )
            except KeyError as error:
                raise TinkerError(f"the token of the server does not say {error}") from None

        return self._connection.run(ask())
