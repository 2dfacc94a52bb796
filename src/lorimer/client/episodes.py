"""Episodes of programs outside: what answers them, their turns as sampled, their rewards; ours alone.

A program is given ``base_url + episode.path`` as the base URL of its OpenAI client.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

from lorimer.client.admin import Caller
from lorimer.client.runs import run_path
from lorimer.client.transport import parse
from lorimer.types.episodes import (
    CreateEpisodeRequest,
    Episode,
    EpisodesResponse,
    EpisodeState,
    FinishEpisodeRequest,
    RunSampler,
    SetRunSamplerRequest,
    Turn,
    TurnsResponse,
)


def episode_path(run_id: str, episode_id: str) -> str:
    return f"{run_path(run_id)}/episodes/{quote(episode_id, safe='')}"


class EpisodesClient(Caller):
    """A run is named by its id or by that of any of its training runs."""

    def set_run_sampler(
        self, run_id: str, sampler: str, *, temperature: float | None = None, max_tokens: int | None = None
    ) -> "Future[RunSampler]":
        """Choose what answers the run's episodes: a ``sampling_session_id``, a checkpoint's path, the base model."""
        body = SetRunSamplerRequest(sampler=sampler, temperature=temperature, max_tokens=max_tokens)
        return self._start("set_run_sampler", RunSampler, "PUT", f"{run_path(run_id)}/sampler", body)

    async def set_run_sampler_async(
        self, run_id: str, sampler: str, *, temperature: float | None = None, max_tokens: int | None = None
    ) -> RunSampler:
        return await self._wait(self.set_run_sampler(run_id, sampler, temperature=temperature, max_tokens=max_tokens))

    def create_episode(
        self,
        run_id: str,
        episode_id: str | None = None,
        *,
        sampler: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> "Future[Episode]":
        """Make an episode with settings of its own; what is not given is the run's."""
        body = CreateEpisodeRequest(
            episode_id=episode_id,
            sampler=sampler,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            user_metadata=dict(user_metadata or {}),
        )
        return self._start("create_episode", Episode, "POST", f"{run_path(run_id)}/episodes", body)

    async def create_episode_async(
        self,
        run_id: str,
        episode_id: str | None = None,
        *,
        sampler: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Episode:
        return await self._wait(
            self.create_episode(
                run_id,
                episode_id,
                sampler=sampler,
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed,
                user_metadata=user_metadata,
            )
        )

    def list_episodes(
        self, run_id: str, *, state: EpisodeState | None = None, after: int = 0, limit: int = 100
    ) -> "Future[EpisodesResponse]":
        """Return episodes with larger numbers than ``after``, in order."""
        query = {"state": state, "after": after, "limit": limit}
        return self._start("list_episodes", EpisodesResponse, "GET", f"{run_path(run_id)}/episodes", query=query)

    async def list_episodes_async(
        self, run_id: str, *, state: EpisodeState | None = None, after: int = 0, limit: int = 100
    ) -> EpisodesResponse:
        return await self._wait(self.list_episodes(run_id, state=state, after=after, limit=limit))

    def get_episode(self, run_id: str, episode_id: str) -> "Future[Episode]":
        """Return an episode: its state, settings, reward and counts."""
        return self._start("get_episode", Episode, "GET", episode_path(run_id, episode_id))

    async def get_episode_async(self, run_id: str, episode_id: str) -> Episode:
        return await self._wait(self.get_episode(run_id, episode_id))

    def get_turns(self, run_id: str, episode_id: str) -> "Future[list[Turn]]":
        """Return all turns of an episode, by number and choice, exactly as they were sampled."""

        async def read() -> list[Turn]:
            found: list[Turn] = []
            has_more = True
            while has_more:
                query = {"after": found[-1].number if found else 0}
                path = episode_path(run_id, episode_id) + "/turns"
                page = parse(TurnsResponse, await self._send("get_turns", "GET", path, query=query))
                found += page.turns
                has_more = page.has_more
            return found

        return self._connection.loop.run(read())

    async def get_turns_async(self, run_id: str, episode_id: str) -> list[Turn]:
        return await self._wait(self.get_turns(run_id, episode_id))

    def finish_episode(
        self,
        run_id: str,
        episode_id: str,
        reward: float | None = None,
        *,
        reward_parts: Mapping[str, float] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> "Future[Episode]":
        """End an episode with a reward, or with an error. The same call again changes nothing."""
        body = FinishEpisodeRequest(
            reward=reward,
            reward_parts=dict(reward_parts or {}),
            user_metadata=dict(user_metadata or {}),
            error=error,
        )
        return self._start("finish_episode", Episode, "POST", episode_path(run_id, episode_id) + "/finish", body)

    async def finish_episode_async(
        self,
        run_id: str,
        episode_id: str,
        reward: float | None = None,
        *,
        reward_parts: Mapping[str, float] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> Episode:
        return await self._wait(
            self.finish_episode(
                run_id, episode_id, reward, reward_parts=reward_parts, user_metadata=user_metadata, error=error
            )
        )

    def delete_episode(self, run_id: str, episode_id: str) -> "Future[None]":
        """Delete an episode with its turns."""
        return self._do("delete_episode", "DELETE", episode_path(run_id, episode_id))

    async def delete_episode_async(self, run_id: str, episode_id: str) -> None:
        await self._wait(self.delete_episode(run_id, episode_id))
