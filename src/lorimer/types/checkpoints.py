"""Messages to save, load, list and copy weights, and to list their runs."""

from datetime import datetime
from typing import Any, Literal

from lorimer.types.base import Counter, Integer, Request, Response
from lorimer.types.optim import AdamOptimizerConfig, OptimizerConfig
from lorimer.types.paths import CheckpointType, ParsedCheckpointTinkerPath, console_url
from lorimer.types.runs import RunIdentity


class SaveWeightsRequest(Request):
    """``path`` is the name of the checkpoint, despite its name."""

    model_id: str
    path: str | None = None
    seq_id: Counter | None = None
    ttl_seconds: Integer | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Response):
    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        return _checkpoint_url(self.path)


class SaveWeightsForSamplerRequest(Request):
    """``path`` creates a checkpoint of that name, ``sampling_session_seq_id`` a sampling session without one."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: Counter | None = None
    seq_id: Counter | None = None
    ttl_seconds: Integer | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponseInternal(Response):
    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponse(Response):
    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        return _checkpoint_url(self.path)

    def get_playground_url(self) -> str:
        return console_url("playground", mode="checkpoint", checkpoint=self.path)


class SaveWeightsExternalRequest(Request):
    model_id: str
    path: str
    seq_id: Counter | None = None
    ttl_seconds: Integer | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(Response):
    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponse(Response):
    path: str
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(Request):
    """Addressed by model and sequence id, or by session and model sequence id, which creates the model."""

    model_id: str | None = None
    seq_id: Counter | None = None
    session_id: str | None = None
    model_seq_id: Counter | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    """Whether to restore the optimizer state too."""
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    run: RunIdentity | None = None
    """Name, configuration and more of the run that a new model is a part of."""
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Response):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Request):
    tinker_path: str


class WeightsInfoResponse(Response):
    base_model: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    method: str | None = None
    """``lora`` or ``full``; the last three fields are Lorimer's own."""
    train_embed: bool | None = None
    train_norms: bool | None = None


class CopyWeightsRequest(Request):
    session_id: str | None = None
    model_seq_id: Counter | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Integer | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Response):
    tinker_path: str


class SetTtlRequest(Request):
    """``ttl_seconds`` is required; null keeps the checkpoint forever."""

    ttl_seconds: Integer | None


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────────


class Cursor(Response):
    offset: int
    limit: int
    total_count: int


class Checkpoint(Response):
    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    step: int | None = None
    """The steps that the run had done, in the count of the client (`optim_steps` of its metrics)."""
    run_id: str | None = None
    """The run that its training run is a part of; only in the list of the caller's checkpoints."""
    run_name: str | None = None


class CheckpointsListResponse(Response):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Response):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    created_at: datetime | None = None
    project_id: str | None = None
    seed: int | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    train_embed: bool | None = None
    train_norms: bool | None = None
    method: str | None = None
    """``lora`` or ``full``."""
    optimizer_type: str | None = None
    replica: str | None = None
    """The replica of the base model that has the run; none if it was evicted, and its next request places it."""
    run_id: str | None = None
    """The run that it is a part of: its own id unless it resumed another training run."""
    run_name: str | None = None
    """The name of that run; of one training run and for its owner."""
    snapshot_bytes: int | None = None
    """Size of the snapshots from which the run is restored, of one run and for its owner."""


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRun]
    cursor: Cursor


class ExternalWeightsUrlsResponse(Response):
    """A URL for each file, by its relative path."""

    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(Response):
    """Where releases up to 0.35 download a checkpoint as one archive."""

    url: str
    expires: datetime


def _checkpoint_url(path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    return console_url("checkpoints", parsed.training_run_id, parsed.checkpoint_id)
