"""Trajectories as rollouts that people read: turns, rewards and their parts, tool calls, errors and times."""

from collections.abc import Sequence
from typing import Any

from lorimer.cookbook.rl.envs import Trajectory, TrajectoryGroup, Transition
from lorimer.cookbook.transcripts import finite, label, logs, message_turn, numbers, prompt_turns, sampled_turn
from lorimer.types import ModelInput, Rollout, RolloutTurn
from lorimer.types.rollouts import MAX_PARTS, RolloutKind
from lorimer.types.runs import MAX_TAGS

GRADER_ERROR = "grader_error"
"""The log in which an environment tells what went wrong while it graded."""


def group_rollouts(
    group: TrajectoryGroup,
    name: str,
    tokenizer: Any,
    *,
    step: int,
    advantages: Sequence[float] | None = None,
    kind: RolloutKind = "rollout",
    split: str = "train",
) -> list[Rollout]:
    """Return the trajectories of a group, then the episodes that it lost, each with its error."""
    shared: dict[str, Any] = {
        "step": step,
        "kind": kind,
        "split": label(split),
        "group": name,
        "tags": list(dict.fromkeys(map(label, group.tags)))[:MAX_TAGS],
    }
    rewards = group.get_total_rewards()
    found = [
        Rollout(
            **shared,
            number=number,
            turns=turns_of(trajectory, tokenizer),
            reward=finite(rewards[number]),
            reward_parts=_parts(group, number),
            advantage=None if advantages is None else finite(advantages[number]),
            stop_reason=_stop_reason(trajectory),
            errors=[str(one.logs[GRADER_ERROR]) for one in trajectory.transitions if GRADER_ERROR in one.logs][
                :MAX_PARTS
            ],
            seconds=_seconds(trajectory),
        )
        for number, trajectory in enumerate(group.trajectories_G)
    ]
    for number, error in enumerate(group.rollout_errors, len(found)):
        turns = [RolloutTurn(role="error", content=f"{type(error).__name__}: {error}")]
        found.append(Rollout(**shared, number=number, turns=turns, stop_reason="error", errors=[turns[0].content]))
    return found


def turns_of(trajectory: Trajectory, tokenizer: Any) -> list[RolloutTurn]:
    """Return prompts and actions in turn. Of a prompt that continues what was said only the rest becomes turns.

    Each message is a turn, where those of the first prompt are known or the tokens are those of a known chat template.
    """
    turns: list[RolloutTurn] = []
    known: list[int] = []
    for step in trajectory.transitions:
        prompt = _tokens(step.ob)
        is_continued = bool(known) and prompt is not None and prompt[: len(known)] == known
        seen = ModelInput.from_ints(prompt[len(known) :]) if is_continued and prompt is not None else step.ob
        if not turns and trajectory.prompt:
            turns += map(message_turn, trajectory.prompt)
        elif seen.length:
            turns += prompt_turns(tokenizer, seen, "environment" if is_continued else "prompt")
        turns.append(_action(step, tokenizer))
        known = [*prompt, *step.ac.tokens] if prompt is not None else []
    last = _tokens(trajectory.final_ob)
    if last and (not known or last != known[: len(last)]):
        rest = last[len(known) :] if last[: len(known)] == known else last
        turns += prompt_turns(tokenizer, ModelInput.from_ints(rest), "environment")
    return turns or [RolloutTurn(role="prompt", content="")]


def _tokens(observation: ModelInput) -> list[int] | None:
    """Return the tokens of an observation; none if it has images."""
    is_text = all(chunk.type == "encoded_text" for chunk in observation.chunks)
    return observation.to_ints() if is_text else None


def _action(step: Transition, tokenizer: Any) -> RolloutTurn:
    return sampled_turn(
        tokenizer,
        step.ac.tokens,
        step.ac.maybe_logprobs,
        reward=finite(step.reward),
        stop_reason=step.ac.stop_reason,
        tool_calls=step.tool_calls[:MAX_PARTS],
        logs=logs(step.logs),
        seconds=step.sampling_seconds,
    )


def _parts(group: TrajectoryGroup, number: int) -> dict[str, float]:
    """Return what the environment measured: of several turns the last, and the reward that the group gave."""
    parts: dict[str, float | int] = {}
    for step in group.trajectories_G[number].transitions:
        parts |= step.metrics
    final = {"group_reward": group.final_rewards_G[number]} if group.final_rewards_G[number] else {}
    return numbers(parts | group.metrics_G[number] | final)


def _stop_reason(trajectory: Trajectory) -> str | None:
    if trajectory.stop_reason is not None or not trajectory.transitions:
        return trajectory.stop_reason
    return trajectory.transitions[-1].ac.stop_reason


def _seconds(trajectory: Trajectory) -> dict[str, float]:
    sampling = [one.sampling_seconds for one in trajectory.transitions if one.sampling_seconds is not None]
    environment = [one.environment_seconds for one in trajectory.transitions if one.environment_seconds is not None]
    times = {"sampling": sampling, "environment": environment}
    return {name: sum(values) for name, values in times.items() if values}
