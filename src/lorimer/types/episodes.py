"""Messages about episodes: what programs outside of Lorimer did with a run's sampler, as it was sampled.

A program calls an OpenAI-compatible address of a run; each answer is a turn of its episode. An episode ends with a
reward, or with the error of its program.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lorimer.types.base import Request, Response

EpisodeState = Literal["open", "finished", "failed", "expired"]

EPISODE_HEADER = "x-lorimer-episode"
"""Names the episode of a request whose path does not."""
MAX_REWARD_PARTS = 100
MAX_PART_CHARS = 200

EpisodeId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
PartName = Annotated[str, Field(min_length=1, max_length=MAX_PART_CHARS)]
Temperature = Annotated[float, Field(ge=0, le=100)]
NumTokens = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class SetRunSamplerRequest(Request):
    """What answers the episodes of a run that name no sampler of their own."""

    sampler: str
    """A ``sampling_session_id``, the ``tinker://`` path of a checkpoint, or the name of the run's base model."""
    temperature: Temperature | None = None
    """Instead of what programs ask for, whose ``top_p`` and ``top_k`` then have no effect."""
    max_tokens: NumTokens | None = None
    """Of one answer; programs may ask for less."""


class RunSampler(Response):
    run_id: str
    sampler: str
    temperature: float | None = None
    max_tokens: int | None = None
    updated_at: datetime


class CreateEpisodeRequest(Request):
    """An episode with settings of its own; without any, the first request of a program makes the episode."""

    episode_id: EpisodeId | None = None
    """The server makes one up if there is none."""
    sampler: str | None = None
    """As for the run; the run's sampler at the time of each turn if there is none."""
    temperature: Temperature | None = None
    max_tokens: NumTokens | None = None
    seed: Seed | None = None
    """Each turn is sampled with a seed of (seed, number of the turn), whatever seed the program asks for."""
    user_metadata: dict[str, Any] = Field(default_factory=dict)


class FinishEpisodeRequest(Request):
    """The end of an episode: a reward, or an error."""

    reward: float | None = None
    reward_parts: dict[PartName, float] = Field(default_factory=dict, max_length=MAX_REWARD_PARTS)
    """Any named numbers, such as the terms of the reward."""
    user_metadata: dict[str, Any] = Field(default_factory=dict)
    """Added to that of the episode."""
    error: str | None = None
    """Why the episode has no reward."""

    @model_validator(mode="after")
    def _has_one_end(self) -> "FinishEpisodeRequest":
        if (self.reward is None) == (self.error is None):
            raise ValueError("a reward or an error is accepted, and one of them is needed")
        return self


class Episode(Response):
    run_id: str
    episode_id: str
    number: int
    """Counts the episodes of the run."""
    state: EpisodeState
    path: str
    """What the base URL of an OpenAI client is below the address of the server."""
    sampler: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = Field(default_factory=dict)
    user_metadata: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    num_turns: int
    num_tokens: int
    """Sampled in all turns."""
    num_bytes: int
    """As stored."""
    created_at: datetime
    last_used_at: datetime
    finished_at: datetime | None = None


class EpisodesResponse(Response):
    episodes: list[Episode]
    """In the order of their numbers."""
    has_more: bool


class Turn(Response):
    """One answer, exactly as it was sampled."""

    number: int
    """Counts the requests of the episode in the order in which they began; one that failed leaves a gap."""
    choice: int
    """Counts the answers to one request."""
    kind: Literal["chat", "completion"]
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]
    sampler: str
    """That answered: a ``sampling_session_id``, a path, or the base model."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None = None
    is_constrained: bool
    """A schema or a forced call limited the tokens: the logprobs are those among the allowed ones."""
    started_at: datetime
    finished_at: datetime


class TurnsResponse(Response):
    turns: list[Turn]
    """By number and choice."""
    has_more: bool
    """More follow the last number of these."""
