"""Runs as people track them: names, notes, tags, configuration, status, curves over all parts; ours alone.

``RunOptions`` are the keywords by which the creation of a training client says which run it belongs to.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypedDict
from urllib.parse import quote

from lorimer.client.admin import Caller
from lorimer.client.metrics import read_metrics
from lorimer.types.metrics import RunMetricsResponse
from lorimer.types.runs import (
    EndStatus,
    FinishRunRequest,
    RunDetails,
    RunFieldsResponse,
    RunGroupsResponse,
    RunIdentity,
    RunsResponse,
    UpdateRunRequest,
)

Archived = Literal["no", "yes", "any"]


class RunOptions(TypedDict, total=False):
    """What a new training client says of its run; all are optional."""

    name: str | None
    """Of the run; the server makes one up if there is none."""
    notes: str | None
    tags: Sequence[str] | None
    config: Mapping[str, Any] | None
    """Any settings, as a JSON object, by whose fields runs are filtered, sorted, grouped and compared."""
    num_steps: int | None
    """How many steps are planned."""
    run_key: str | None
    """The same each time a program resumes its run, which then gets another part instead of a new run."""
    first_step: int | None
    """The first step that this client logs metrics of; what earlier parts logged from there on is superseded."""


def identity_of(options: RunOptions) -> RunIdentity | None:
    """Return the options as they are sent; none if there are none. Raise ``TypeError`` for an unknown one."""
    if unknown := sorted(options.keys() - RunOptions.__annotations__.keys()):
        accepted = ", ".join(RunOptions.__annotations__)
        raise TypeError(f"{unknown[0]!r} is not an option of a run; accepted are {accepted}")
    given = {name: value for name, value in options.items() if value is not None}
    return RunIdentity.model_validate(given) if given else None


def run_path(run_id: str) -> str:
    return f"/runs/{quote(run_id, safe=':')}"


class RunsClient(Caller):
    """A run is named by its id or by that of any of its training runs."""

    def get_run(self, run_id: str) -> "Future[RunDetails]":
        """Return a run with its configuration, status, progress, summary of its metrics, parts and lineage."""
        return self._start("get_run", RunDetails, "GET", run_path(run_id))

    async def get_run_async(self, run_id: str) -> RunDetails:
        return await self._wait(self.get_run(run_id))

    def list_runs(
        self,
        query: str | None = None,
        *,
        sort: str | None = None,
        fields: Sequence[str] | None = None,
        archived: Archived | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> "Future[RunsResponse]":
        """Return the runs that match a query such as ``status=failed config.rank>8 words``, newest first.

        ``sort`` is a field (``-min.test/nll``: descending); ``fields`` are those that ``values`` of each run has.
        """
        given = {
            "q": query,
            "sort": sort,
            "fields": None if fields is None else ",".join(fields),
            "archived": archived,
            "limit": limit,
            "offset": offset,
        }
        return self._start("list_runs", RunsResponse, "GET", "/runs", query=given)

    async def list_runs_async(
        self,
        query: str | None = None,
        *,
        sort: str | None = None,
        fields: Sequence[str] | None = None,
        archived: Archived | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> RunsResponse:
        return await self._wait(
            self.list_runs(query, sort=sort, fields=fields, archived=archived, limit=limit, offset=offset)
        )

    def group_runs(
        self, by: str, query: str | None = None, *, archived: Archived | None = None
    ) -> "Future[RunGroupsResponse]":
        """Return the values of a field, such as ``tag`` or ``config.rank``, with their numbers of runs."""
        given = {"by": by, "q": query, "archived": archived}
        return self._start("group_runs", RunGroupsResponse, "GET", "/run_groups", query=given)

    async def group_runs_async(
        self, by: str, query: str | None = None, *, archived: Archived | None = None
    ) -> RunGroupsResponse:
        return await self._wait(self.group_runs(by, query, archived=archived))

    def list_run_fields(
        self, query: str | None = None, *, archived: Archived | None = None
    ) -> "Future[RunFieldsResponse]":
        """Return the names of configuration fields, metrics and tags of the runs that match."""
        given = {"q": query, "archived": archived}
        return self._start("list_run_fields", RunFieldsResponse, "GET", "/run_fields", query=given)

    async def list_run_fields_async(
        self, query: str | None = None, *, archived: Archived | None = None
    ) -> RunFieldsResponse:
        return await self._wait(self.list_run_fields(query, archived=archived))

    def update_run(
        self,
        run_id: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        num_steps: int | None = None,
        is_archived: bool | None = None,
    ) -> "Future[RunDetails]":
        """Change what is given and leave the rest; ``tags`` and ``config`` replace the old ones."""
        body = UpdateRunRequest(
            name=name,
            notes=notes,
            tags=None if tags is None else list(tags),
            config=None if config is None else dict(config),
            num_steps=num_steps,
            is_archived=is_archived,
        )
        return self._start("update_run", RunDetails, "PATCH", run_path(run_id), body)

    async def update_run_async(
        self,
        run_id: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        num_steps: int | None = None,
        is_archived: bool | None = None,
    ) -> RunDetails:
        return await self._wait(
            self.update_run(
                run_id,
                name=name,
                notes=notes,
                tags=tags,
                config=config,
                num_steps=num_steps,
                is_archived=is_archived,
            )
        )

    def finish_run(self, run_id: str, status: EndStatus, error: str | None = None) -> "Future[None]":
        """Record how a run ended, before its session ends."""
        body = FinishRunRequest(status=status, error=error)
        return self._do("finish_run", "POST", f"{run_path(run_id)}/finish", body)

    async def finish_run_async(self, run_id: str, status: EndStatus, error: str | None = None) -> None:
        await self._wait(self.finish_run(run_id, status, error))

    def delete_run(self, run_id: str) -> "Future[None]":
        """Delete a run that is not running, with its checkpoints and metrics."""
        return self._do("delete_run", "DELETE", run_path(run_id))

    async def delete_run_async(self, run_id: str) -> None:
        await self._wait(self.delete_run(run_id))

    def get_run_metrics(
        self,
        run_id: str,
        names: Sequence[str] | None = None,
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        max_points: int | None = None,
    ) -> "Future[RunMetricsResponse]":
        """Return the points of a run's metrics over all parts, or of those called ``names``."""
        chosen = {"first_step": first_step, "last_step": last_step, "max_points": max_points}
        path = f"/api/v1{run_path(run_id)}/metrics"
        return self._connection.loop.run(read_metrics(self._connection, path, names, None, **chosen))

    async def get_run_metrics_async(
        self,
        run_id: str,
        names: Sequence[str] | None = None,
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        max_points: int | None = None,
    ) -> RunMetricsResponse:
        chosen = {"first_step": first_step, "last_step": last_step, "max_points": max_points}
        return await self._wait(self.get_run_metrics(run_id, names, **chosen))
