"""From trajectories to training data.

Turns of a trajectory share one datum as long as each prompt is the previous prompt, the previous action and something
more: a long episode then costs one pass over its tokens and not one for each turn. Where a prompt is not such an
extension, for instance because the template drops old thinking, a new datum begins. What several trajectories of a
group said alike, with the same reward, is one datum that weighs as much: short replies are often the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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


def trajectory_to_data(trajectory: Trajectory, advantage: float) -> list[RolloutDatum]:
    """The data of a trajectory, every sampled token with the same advantage. Turns without tokens leave no trace."""
    data: list[RolloutDatum] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[float] = []

    def close() -> None:
        if any(mask):
            is_sampled = np.array(mask[1:], np.float32)
            data.append(
                RolloutDatum(
                    np.array(tokens, np.int64),
                    np.array(logprobs[1:], np.float32),
                    (advantage * is_sampled).astype(np.float32),
                    is_sampled,
                )
            )
        for values in (tokens, logprobs, mask):
            values.clear()

    for step in trajectory.transitions:
        prompt = step.ob.to_ints()
        if prompt[: len(tokens)] != tokens:
            close()
        added = prompt[len(tokens) :]
        tokens += added + step.ac.tokens
        logprobs += [0.0] * len(added) + step.ac.logprobs
        mask += [0.0] * len(added) + [1.0] * len(step.ac.tokens)
    close()
    return data


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
