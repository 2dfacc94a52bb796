"""Messages about trainings that the server runs for a user, and about a look at their data before."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from lorimer.types.base import Request, Response

TrainingKind = Literal["sft", "full", "rl", "dpo", "distill"]
RecipeKind = Annotated[str, Field(pattern="^recipe:[a-z0-9_]+$")]
"""A recipe of ``lorimer recipe list``, as ``recipe:NAME``."""
TrainingState = Literal["running", "finished", "failed", "stopped", "interrupted"]
"""``stopped`` by its user, ``interrupted`` by the end of the server; both can be resumed, as can ``failed``."""
DataForm = Literal["sft", "dpo", "rl", "distill"]

MAX_SHOWN = 50


class StartTrainingRequest(Request):
    kind: TrainingKind | RecipeKind
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of ``lorimer train``, or options of the recipe, by name, as ``/api/v1/training_kinds`` lists them."""
    data: str | None = None
    """The rows to train on, as the text of a JSONL file; what the setting ``data`` names on a command line."""
    held_out_data: str | None = None
    """Rows to measure with, likewise."""
    dry_run: bool = False
    """Count steps and tokens and measure two steps, which are thrown away; not for recipes."""


class Training(Response):
    training_id: str
    kind: str
    base_model: str
    settings: dict[str, Any] = Field(default_factory=dict)
    dry_run: bool = False
    state: TrainingState
    run_id: str | None = None
    """The run whose metrics it logs, once there is one."""
    run_name: str | None = None
    num_starts: int = 1
    error: str | None = None
    """Why it failed."""
    result: dict[str, Any] | None = None
    """Paths of the weights and last metrics, or the numbers of a dry run."""
    created_at: datetime
    started_at: datetime
    finished_at: datetime | None = None


class TrainingDetails(Training):
    output: str
    """The end of what its process has printed."""


class TrainingsResponse(Response):
    trainings: list[Training]
    """Newest first."""
    total_count: int


class TrainingKindsResponse(Response):
    is_offered: bool
    reason: str = ""
    """Why no training can be started here."""
    kinds: dict[str, dict[str, Any]]
    """The JSON schema of the settings of each kind, without those that a server decides itself; recipes are called
    ``recipe:NAME``. ``x-rows`` says whether ``data`` is ``needed``, ``optional`` or ``none``."""


class CheckDataRequest(Request):
    model: str
    """The base model, whose tokenizer and chat template are used."""
    data: str
    """The rows, as the text of a JSONL file."""
    held_out_data: str | None = None
    form: DataForm | None = None
    """The training that the rows are for; without it dpo if rows have ``chosen``, else sft."""
    num_held_out: Annotated[int, Field(ge=0)] | None = None
    max_length: Annotated[int, Field(ge=2, le=1_000_000)] = 1024
    train_on: str = "all_assistant_messages"
    renderer: str = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
    num_shown: Annotated[int, Field(ge=0, le=MAX_SHOWN)] = 3


class DataFinding(Response):
    problem: str
    row: int
    text: str
    file: Literal["data", "held_out"] = "data"


class DataSpan(Response):
    """Tokens next to each other, of which all or none are trained on."""

    text: str
    is_trained: bool
    pieces: list[str]
    """The text of each token."""


class DataCheckResponse(Response):
    form: DataForm
    num_rows: int
    num_held_out: int
    num_examples: int
    num_tokens: int
    num_trained_tokens: int
    num_truncated: int
    lengths: dict[str, int]
    problems: dict[str, int]
    """How many findings there are of each problem."""
    findings: list[DataFinding]
    """The first of them."""
    previews: list[list[DataSpan]]
    """The first examples."""
