"""Messages about runs as people track them: name, notes, tags, configuration, status, progress and lineage.

A run consists of one or more training runs, its parts: a program that resumes from a checkpoint under the same
``run_key`` adds a part to the same run. The id of a run is that of its first part.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lorimer.types.base import Counter, Request, Response
from lorimer.types.metrics import RunMetricsResponse

RunStatus = Literal["running", "finished", "failed", "interrupted"]
EndStatus = Literal["finished", "failed", "interrupted"]

MAX_NAME_CHARS = 200
MAX_TAG_CHARS = 100
MAX_TAGS = 50

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)]
Tags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]


def _check_printable(text: str | None) -> str | None:
    if text is not None and not (text.isprintable() and text.strip()):
        raise ValueError(f"{text[:80]!r} is not accepted; printable characters in one line are")
    return text


class _Described(Request):
    """What a client says about a run."""

    name: Name | None = None
    notes: str | None = None
    tags: Tags | None = None
    config: dict[str, Any] | None = None
    """Any JSON object. The list of runs is filtered, sorted and grouped by its fields, nested ones by ``a.b``."""
    num_steps: Counter | None = None
    """How many steps are planned, in the count of the client."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        return _check_printable(name)

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, tags: list[str] | None) -> list[str] | None:
        for tag in tags or []:
            _check_printable(tag)
        return None if tags is None else list(dict.fromkeys(tags))


class RunIdentity(_Described):
    """The run that a new training run belongs to.

    A key that the user's runs have already adds a part to that run; its name, notes and tags stay as they are.
    """

    run_key: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """Chosen by the program, and the same each time it resumes; without one every training run is a run of its own."""
    first_step: Counter | None = None
    """The first step that the new part reports metrics of: those of earlier parts from there on are superseded."""


class UpdateRunRequest(_Described):
    """Fields that are left out stay as they are; ``tags`` and ``config`` replace the old ones."""

    is_archived: bool | None = None


class FinishRunRequest(Request):
    status: EndStatus
    error: str | None = None


class MetricSummary(Response):
    """The last, smallest and largest finite value of a metric over all parts, each with its step."""

    name: str
    last: float | None = None
    last_step: int | None = None
    min: float | None = None
    min_step: int | None = None
    max: float | None = None
    max_step: int | None = None


class RunPart(Response):
    """One training run of a run."""

    training_run_id: str
    session_id: str
    created_at: datetime
    last_request_time: datetime
    loaded_from: str | None = None
    """The checkpoint that it started with."""
    first_step: int | None = None
    """The first step that its client reports; those of earlier parts from there on are superseded."""
    optim_steps_before: int = 0
    """The optimizer steps of the run before it, by which the steps of its engine metrics are shifted."""
    corrupted: str | None = None


class RunLink(Response):
    run_id: str
    name: str


class Run(Response):
    run_id: str
    """The id of the run's first training run."""
    name: str
    notes: str = ""
    tags: list[str] = Field(default_factory=list)
    status: RunStatus
    error: str | None = None
    """Why it failed, as far as that is known."""
    base_model: str
    training_run_id: str
    """The newest part, which is the one that trains."""
    num_parts: int = 1
    session_id: str
    session_name: str | None = None
    project_id: str | None = None
    created_at: datetime
    last_request_time: datetime
    duration_seconds: float
    """Of all parts, without the time between them."""
    steps_done: int | None = None
    """As the client reported it, else the number of optimizer steps."""
    num_steps: int | None = None
    eta_seconds: float | None = None
    """The time to the last planned step at the pace of this part; none if the run is not running."""
    is_archived: bool = False
    parent_path: str | None = None
    """The checkpoint that the run started from; one of another run."""
    parent_run_id: str | None = None
    user_metadata: dict[str, str] | None = None
    values: dict[str, float | str | None] | None = None
    """The fields that a list was asked for."""


class EngineDeath(Response):
    """An operation of a run during which an engine died; it was computed again."""

    training_run_id: str
    kind: str
    step: int
    """Steps of the run before it, in the count of the client."""
    time: datetime
    num_deaths: int


class RunDetails(Run):
    config: dict[str, Any] = Field(default_factory=dict)
    metrics: list[MetricSummary] = Field(default_factory=list)
    parts: list[RunPart] = Field(default_factory=list)
    """Oldest first."""
    engine_deaths: list[EngineDeath] = Field(default_factory=list)
    """Oldest first; as long as the server keeps the history of operations."""
    parent: RunLink | None = None
    children: list[RunLink] = Field(default_factory=list)
    """Runs that started from a checkpoint of this one, newest first, at most 100."""


class RunsResponse(Response):
    runs: list[Run]
    total_count: int


class RunGroup(Response):
    value: str | None
    """None: the runs without one."""
    num_runs: int


class RunGroupsResponse(Response):
    groups: list[RunGroup]
    """Largest first, at most 1000. A run with several tags is in several groups."""


class RunFieldsResponse(Response):
    """The names by which runs can be filtered, sorted and grouped, found in the newest 1000 runs that match."""

    config: list[str]
    metrics: list[str]
    tags: list[str]


class JoinedMetricsResponse(RunMetricsResponse):
    is_restarted: bool = False
    """A part was added since ``after``: this answer starts from the first point, and points read before are stale."""
