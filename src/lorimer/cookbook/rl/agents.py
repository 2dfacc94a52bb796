"""Rollouts of programs outside: an agent written against OpenAI's API is an environment that plays itself.

Each episode is an address on the server, which answers with the policy's weights and records every turn as sampled.
The agent gets that address and returns a reward; its turns become a trajectory. An agent that raises, hangs or asks
nothing costs its own episode. Groups, advantages and updates are those of `training.py`.
"""

import asyncio
import inspect
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lorimer import RestClient
from lorimer.cookbook.completers import TokensWithLogprobs
from lorimer.cookbook.rl.datums import trajectory_to_data
from lorimer.cookbook.rl.envs import Metrics, SelfPlayedEnv, Trajectory, Transition
from lorimer.cookbook.rl.rollouts import Policy
from lorimer.errors import InvalidInput, LorimerError
from lorimer.types import ModelInput
from lorimer.types.episodes import Episode, Turn

NO_KEY = "tml-local"
"""What an OpenAI client, which insists on a key, sends to a server without keys."""
MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class AgentCall:
    """What an agent gets for one episode."""

    task: Any
    base_url: str
    """Of an OpenAI client. Every request to it is recorded."""
    api_key: str
    episode_id: str
    model: str = "lorimer"
    """Any name is accepted: the policy answers."""


@dataclass(frozen=True)
class Outcome:
    """What an agent returns if a number does not say it all."""

    reward: float
    metrics: Metrics = field(default_factory=dict)
    """Averaged over episodes, and stored as parts of the reward."""


Agent: TypeAlias = Callable[[AgentCall], "Awaitable[float | Outcome | None] | float | Outcome | None"]
"""Returns a reward, or None if its program has ended the episode by itself (``POST base_url/finish``)."""


class AgentFailed(LorimerError):
    """An agent came to no reward."""


class ExternalAgents:
    """Runs episodes of one agent; called with a task, it makes the environment of an episode.

    ``ProblemDataset(tasks, ExternalAgents(agent), batch_size=..., group_size=...)`` is a dataset for RL. A coroutine
    function is cancelled after ``timeout_seconds``. Another function runs in a thread, which cannot be ended: its
    episode is over then, and the server refuses its further requests.
    """

    def __init__(self, agent: Agent, *, timeout_seconds: float = 600.0, max_concurrent: int = 64) -> None:
        if max_concurrent < 1 or not timeout_seconds > 0:
            raise InvalidInput(
                f"max_concurrent is {max_concurrent} and timeout_seconds {timeout_seconds}; positive ones are accepted"
            )
        self.agent, self.timeout_seconds, self.max_concurrent = agent, timeout_seconds, max_concurrent
        self._room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def __call__(self, task: Any) -> "ExternalAgent":
        return ExternalAgent(self, task)

    @property
    def room(self) -> asyncio.Semaphore:
        """Limits the agents that run concurrently on this event loop."""
        loop = asyncio.get_running_loop()
        if self._room is None or self._room[0] is not loop:
            self._room = loop, asyncio.Semaphore(self.max_concurrent)
        return self._room[1]

    async def run(self, call: AgentCall) -> Outcome | None:
        """Run the agent once. Raise ``AgentFailed`` if it takes too long or returns something else."""
        try:
            async with asyncio.timeout(self.timeout_seconds):
                found = await self._start(call)
        except TimeoutError as error:
            raise AgentFailed(f"the agent took longer than {self.timeout_seconds:g} seconds") from error
        if found is None or isinstance(found, Outcome):
            return found
        if isinstance(found, bool | int | float):
            return Outcome(float(found))
        raise AgentFailed(f"the agent returned {found!r}; a reward, an Outcome or None is accepted")

    async def _start(self, call: AgentCall) -> Any:
        if inspect.iscoroutinefunction(self.agent):
            return await self.agent(call)
        found = await in_thread(self.agent, call)
        return await found if inspect.isawaitable(found) else found


async def in_thread(agent: Agent, call: AgentCall) -> Any:
    """Run an agent in a thread of its own, which does not hold the program when it ends: an agent may hang."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: Exception | None) -> None:
        if ended.cancelled():
            return
        if error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = agent(call)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, name=f"agent {call.episode_id}", daemon=True).start()
    return await ended


class ExternalAgent(SelfPlayedEnv):
    """One episode of an agent at one task."""

    def __init__(self, agents: ExternalAgents, task: Any) -> None:
        self.agents, self.task = agents, task

    async def play(self, policy: Policy) -> Trajectory:
        if not policy.run_id:
            raise InvalidInput("the policy names no run, whose episodes programs outside could play; see Policy.run_id")
        connection = policy.sampling_client.holder.connection
        rest = RestClient(connection)
        async with self.agents.room:
            episode = await rest.create_episode_async(
                policy.run_id,
                sampler=policy.sampling_client.sampling_session_id,
                temperature=policy.temperature,
                max_tokens=policy.max_tokens,
                seed=policy.seed,
                user_metadata={"step": policy.step},
            )
            address, key = await connection.run(connection.address())
            call = AgentCall(
                task=self.task,
                base_url=address + episode.path,
                api_key=key or NO_KEY,
                episode_id=episode.episode_id,
            )
            episode = await self._finished(rest, episode, call)
        turns = await rest.get_turns_async(episode.run_id, episode.episode_id)
        return to_trajectory(episode, turns)

    async def _finished(self, rest: RestClient, episode: Episode, call: AgentCall) -> Episode:
        """Run the agent and end its episode as it ended."""
        place = (episode.run_id, episode.episode_id)
        try:
            outcome = await self.agents.run(call)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            with suppress(Exception):  # the program may have ended it; the first error is the one to see
                await rest.finish_episode_async(*place, error=said)
            raise
        if outcome is not None:
            parts = {name: float(value) for name, value in outcome.metrics.items()}
            return await rest.finish_episode_async(*place, outcome.reward, reward_parts=parts)
        ended = await rest.get_episode_async(*place)
        if ended.state != "finished":
            raise AgentFailed(f"the agent returned no reward, and its episode is {ended.state}: {ended.error or ''}")
        return ended


def to_trajectory(episode: Episode, turns: Sequence[Turn]) -> Trajectory:
    """The trajectory of a finished episode, its reward at the last turn.

    A turn that a schema or a forced call confined has logprobs among the allowed tokens only, which no trainer can
    compare with its own: later turns have it in their prompts, and it is not trained itself.
    """
    if episode.reward is None:
        raise InvalidInput(f"episode {episode.episode_id!r} is {episode.state}; one with a reward is accepted")
    free = [turn for turn in turns if not turn.is_constrained]
    if not free:
        raise AgentFailed(
            f"the agent made {len(turns)} requests, and {'all were confined to a grammar' if turns else 'none'};"
            " at least one free answer is needed"
        )
    metrics: Metrics = {**episode.reward_parts, "constrained_turns": len(turns) - len(free)}
    transitions = [
        Transition(
            ModelInput.from_ints(turn.prompt_tokens),
            TokensWithLogprobs(turn.tokens, turn.logprobs, turn.stop_reason),
            reward=0.0,
            episode_done=False,
        )
        for turn in free
    ]
    metrics["data_per_episode"] = len(trajectory_to_data(Trajectory(transitions, ModelInput.empty()), 1.0))
    last = transitions[-1]
    logs: dict[str, str | int | float] = {"episode_id": episode.episode_id}
    transitions[-1] = Transition(last.ob, last.ac, episode.reward, True, metrics, logs)
    return Trajectory(transitions, ModelInput.empty())


# ── programs ──────────────────────────────────────────────────────────────────────────────────────────


def program(command: Sequence[str], env: Mapping[str, str] | None = None) -> Agent:
    """An agent that is a program of any language, run once for each episode.

    It finds its address in OPENAI_BASE_URL and OPENAI_API_KEY and its task, as JSON, in its input. The last line of its
    output is the reward, or an object with a ``reward`` and other numbers; a program that prints nothing has ended its
    episode by itself. An exit code other than 0 is an error.
    """

    async def run(call: AgentCall) -> Outcome | None:
        own = {"OPENAI_BASE_URL": call.base_url, "OPENAI_API_KEY": call.api_key, "OPENAI_MODEL": call.model}
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **(env or {}), **own},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await process.communicate(json.dumps(call.task).encode())
        finally:
            if process.returncode is None:  # cancelled: whatever it started goes too
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            words = errors.decode("utf-8", "replace").strip()[-MAX_ERROR_CHARS:]
            raise AgentFailed(f"{command[0]!r} ended with {process.returncode}: {words}")
        return read_reward(output.decode("utf-8", "replace"))

    return run


def read_reward(output: str) -> Outcome | None:
    """Read the last line of a program's output; none if there is nothing."""
    lines = output.strip().splitlines()
    if not lines:
        return None
    try:
        value = json.loads(lines[-1])
        fields = dict(value) if isinstance(value, dict) else {"reward": value}
        return Outcome(float(fields.pop("reward")), {name: float(number) for name, number in fields.items()})
    except (ValueError, TypeError, KeyError) as error:
        raise AgentFailed(f"the program's last line is {lines[-1][:200]!r}; a reward is accepted") from error
