"""From trajectories to training data.

A turn whose prompt begins with all tokens of an earlier turn, its action included, is appended to the datum of that
turn: a long episode then costs one pass over its tokens and not one for each turn. Where a prompt extends none, for
instance because the template drops old thinking or a program rewrote the history, a new datum begins; so it does for
the second of two turns that extend the same one. Every sampled token is trained once. What several trajectories of a
group said alike, with the same reward, is one datum that weighs as much: short replies are often the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lorimer.cookbook.completers import TokensWithLogprobs
from lorimer.cookbook.rl.envs import Trajectory, TrajectoryGroup
from lorimer.types import Datum, EncodedTextChunk, ModelInput


@dataclass(frozen=True, eq=False)
class RolloutDatum:
    """Tokens of one turn or several. The other arrays belong to the targets ``tokens[1:]`` and are one shorter."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    """Of the sampler; 0 where the token was not sampled."""
    advantages: NDArray[np.float32]
    mask: NDArray[np.float32]
    """1 where the token was sampled. Stays on this side."""
    count: int = 1
    """How many trajectories it stands for; the advantages are of all of them together."""

    def to_datum(self, loss_fn: str) -> Datum:
        """What ``forward_backward`` takes for ``loss_fn``."""
        inputs = {"target_tokens": self.tokens[1:], "logprobs": self.logprobs, "advantages": self.advantages}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = self.mask
        text = EncodedTextChunk.from_array(self.tokens[:-1].astype(np.int32))
        return Datum(ModelInput(chunks=[text]), inputs)  # type: ignore[arg-type]


@dataclass
class _Chain:
    """The turns of one datum."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)

    def is_prefix_of(self, prompt: list[int]) -> bool:
        return prompt[: len(self.tokens)] == self.tokens

    def append(self, prompt: list[int], action: TokensWithLogprobs) -> None:
        added = prompt[len(self.tokens) :]
        self.tokens += added + action.tokens
        self.logprobs += [0.0] * len(added) + action.logprobs
        self.mask += [0.0] * len(added) + [1.0] * len(action.tokens)

    def to_data(self, advantage: float) -> RolloutDatum:
        is_sampled = np.array(self.mask[1:], np.float32)
        return RolloutDatum(
            np.array(self.tokens, np.int64),
            np.array(self.logprobs[1:], np.float32),
            (advantage * is_sampled).astype(np.float32),
            is_sampled,
        )


def trajectory_to_data(trajectory: Trajectory, advantage: float) -> list[RolloutDatum]:
    """The data of a trajectory, every sampled token with the same advantage. Turns without tokens leave no trace."""
    chains: list[_Chain] = []
    for step in trajectory.transitions:
        prompt = step.ob.to_ints()
        extended = [chain for chain in chains if chain.is_prefix_of(prompt)]
        if not extended:
            chains.append(_Chain())
        # The longest has most of the prompt already.
        longest = max(extended, key=lambda chain: len(chain.tokens), default=chains[-1])
        longest.append(prompt, step.ac)
    return [chain.to_data(advantage) for chain in chains if any(chain.mask)]


def assemble_training_data(
    groups_P: Sequence[TrajectoryGroup], advantages_P: Sequence[NDArray[np.float64]]
) -> list[RolloutDatum]:
    """The data of many groups, in their order."""
    return [
        datum
        for group, advantages_G in zip(groups_P, advantages_P, strict=True)
        for datum in merge_equal(
            datum
            for trajectory, advantage in zip(group.trajectories_G, advantages_G, strict=True)
            for datum in trajectory_to_data(trajectory, float(advantage))
        )
    ]


def merge_equal(data: Iterable[RolloutDatum]) -> list[RolloutDatum]:
    """One datum for all with the same tokens and advantages. Every loss is proportional to the size of an advantage, so
    the gradient stays the same."""
    equal: dict[tuple[bytes, ...], list[RolloutDatum]] = defaultdict(list)
    for datum in data:
        equal[datum.tokens.tobytes(), datum.mask.tobytes(), datum.advantages.tobytes()].append(datum)
    return [replace(same[0], advantages=same[0].advantages * len(same), count=len(same)) for same in equal.values()]
