"""Playing episodes: one policy through the environments of a group.

A policy is frozen weights and a seed; every draw derives from the seed of the group, the number of the trajectory and
the turn. An episode that raises is left out of its group and counted; what to do about it is the caller's business.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorimer import SamplingClient
from lorimer.cookbook.completers import (
    StopCondition,
    TinkerTokenCompleter,
    TokenCompleter,
    TokensWithLogprobs,
    derive_seed,
)
from lorimer.cookbook.rl.envs import (
    Env,
    EnvGroupBuilder,
    Observation,
    SelfPlayedEnv,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from lorimer.errors import InvalidInput, LorimerError

log = logging.getLogger("lorimer")

Start = tuple[Observation, StopCondition]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What rollouts sample from, and how."""

    sampling_client: SamplingClient
    max_tokens: int
    """Of one turn."""
    temperature: float = 1.0
    seed: int = 0
    max_trajectory_tokens: int | None = None
    """Of the prompt and all turns together, for instance the model's context; a longer episode ends there."""
    step: int = 0
    """Of training, at which the weights were taken."""
    run_id: str = ""
    """The run that they belong to, for episodes of programs outside."""

    def seeded(self, *parts: int | str) -> "Policy":
        """The same policy with a seed of its own."""
        return replace(self, seed=derive_seed(self.seed, *parts))

    def completer(self, *parts: int | str) -> TinkerTokenCompleter:
        seed = derive_seed(self.seed, *parts)
        return TinkerTokenCompleter(self.sampling_client, self.max_tokens, self.temperature, seed)

    def room_after(self, observation: Observation) -> int:
        """How many tokens a turn may have; none is left where this is not positive."""
        if self.max_trajectory_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, self.max_trajectory_tokens - observation.length)


async def do_single_rollout(
    complete: TokenCompleter,
    env: Env,
    *,
    start: Start | None = None,
    first_action: TokensWithLogprobs | None = None,
    max_trajectory_tokens: int | None = None,
) -> Trajectory:
    """Play an episode to its end. ``start`` and ``first_action`` are given where they are known already."""
    observation, stop = start or await env.initial_observation()
    prompt = list(env.prompt_messages())
    transitions: list[Transition] = []
    while True:
        room = None if max_trajectory_tokens is None else max_trajectory_tokens - observation.length
        if room is not None and room <= 0:
            return Trajectory(transitions, observation, "max_tokens", prompt)
        begun = time.monotonic()
        action = first_action or await complete(observation, stop, max_tokens=room)
        sampled = time.monotonic()
        result = await env.step(action.tokens)
        transitions.append(
            Transition(
                observation,
                action,
                result.reward,
                result.episode_done,
                result.metrics,
                result.logs,
                result.tool_calls,
                None if first_action else sampled - begun,
                time.monotonic() - sampled,
            )
        )
        first_action = None
        observation, stop = result.next_observation, result.next_stop_condition
        if result.episode_done:
            return Trajectory(transitions, observation, prompt=prompt)


async def do_group_rollout(builder: EnvGroupBuilder, policy: Policy) -> TrajectoryGroup:
    """Play the episodes of a group concurrently and assign their rewards. An error of the group loses all of them."""
    try:
        envs = list(await builder.make_envs())
        starts: Sequence[Start | None] = [None] * len(envs)
        firsts: Sequence[TokensWithLogprobs | None] = [None] * len(envs)
        if builder.shares_start and envs and not any(isinstance(env, SelfPlayedEnv) for env in envs):
            starts, firsts = await _shared_start(envs, policy)
        played = await asyncio.gather(
            *(
                env.play(policy.seeded(index))
                if isinstance(env, SelfPlayedEnv)
                else do_single_rollout(
                    policy.completer(index),
                    env,
                    start=start,
                    first_action=first,
                    max_trajectory_tokens=policy.max_trajectory_tokens,
                )
                for index, (env, start, first) in enumerate(zip(envs, starts, firsts, strict=True))
            ),
            return_exceptions=True,
        )
        return await _finish(builder, policy, envs, played)
    except Exception as error:
        is_refused = isinstance(error, LorimerError)  # by the server, so that the message says what is wrong
        log.warning("a group was lost: %r", error, exc_info=None if is_refused else error)
        return TrajectoryGroup([], [], [], builder.logging_tags(), [error], policy.step)
    finally:
        await builder.cleanup()


async def _shared_start(envs: list[Env], policy: Policy) -> tuple[list[Start], Sequence[TokensWithLogprobs | None]]:
    starts = [await env.initial_observation() for env in envs]
    observation, stop = starts[0]
    if any(start != starts[0] for start in starts):
        raise InvalidInput("a group with shares_start begins with different prompts; they must be the same")
    room = policy.room_after(observation)
    if room <= 0:
        return starts, [None] * len(envs)
    return starts, await policy.completer("start").sample(observation, stop, len(envs), max_tokens=room)


async def _finish(
    builder: EnvGroupBuilder, policy: Policy, envs: list[Env], played: Sequence[Trajectory | BaseException]
) -> TrajectoryGroup:
    errors = []
    for index, outcome in enumerate(played):
        if isinstance(outcome, Exception):
            log.warning("episode %d of a group was lost: %r", index, outcome, exc_info=outcome)
            errors.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    ended = [
        (trajectory, env) for trajectory, env in zip(played, envs, strict=True) if isinstance(trajectory, Trajectory)
    ]
    trajectories = [trajectory for trajectory, _ in ended]
    rewards = await builder.compute_group_rewards(trajectories, [env for _, env in ended])
    return TrajectoryGroup(
        trajectories_G=trajectories,
        final_rewards_G=[reward for reward, _ in rewards],
        metrics_G=[metrics for _, metrics in rewards],
        tags=builder.logging_tags(),
        rollout_errors=errors,
        sampler_step=policy.step,
    )


def raise_if_all_lost(groups: Sequence[TrajectoryGroup]) -> None:
    """Raise the first error of a batch in which no episode came to its end: that is no accident but a mistake."""
    errors = [error for group in groups for error in group.rollout_errors]
    if errors and not any(group.trajectories_G for group in groups):
        raise errors[0]
