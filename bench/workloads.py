"""Generates the data of every row, random and seeded, the same for both sides.

A datum is the engine's own: position i of ``tokens`` predicts ``target_tokens[i]``. The peers read the same fields.
"""

from collections.abc import Sequence

import numpy as np

from lorimer.engine.messages import Datum, SampledSequence


def sft_data(lengths: Sequence[int], vocab_size: int, seed: int, system_prompt: int = 0) -> list[Datum]:
    """Return cross-entropy data with weight 1 everywhere but on a system prompt that all of them begin with."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, vocab_size, system_prompt)
    data = []
    for length in lengths:
        text = np.concatenate([system, rng.integers(0, vocab_size, length + 1)])
        weights = np.ones(len(text) - 1, np.float32)
        weights[:system_prompt] = 0
        inputs: dict[str, np.ndarray] = {"target_tokens": text[1:], "weights": weights}
        data.append(Datum(tokens=text[:-1], loss_fn_inputs=inputs))
    return data


def rl_data(
    num_sequences: int, prompt: int, completion: int, vocab_size: int, seed: int, group_size: int = 1
) -> list[Datum]:
    """Return importance-sampling data where only the completions have an advantage; each prompt has a group."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(num_sequences // group_size):
        asked = rng.integers(0, vocab_size, prompt)
        for _ in range(group_size):
            text = np.concatenate([asked, rng.integers(0, vocab_size, completion + 1)])
            data.append(_rl_datum(text, _likely_logprobs(rng, completion, vocab_size), float(rng.normal())))
    return data


def episode_data(prompt: int, turn: int, num_turns: int, num_branches: int, vocab_size: int, seed: int) -> list[Datum]:
    """Return importance-sampling data of episodes that begin with one prompt: a datum for each turn of each episode.

    The second half of a turn was sampled and has an advantage; the datum of a turn has all turns before it.
    """
    rng = np.random.default_rng(seed)
    asked = rng.integers(0, vocab_size, prompt)
    data = []
    for _ in range(num_branches):
        text, advantage = asked, float(rng.normal())
        for _ in range(num_turns):
            text = np.concatenate([text, rng.integers(0, vocab_size, turn)])
            data.append(_rl_datum(text, _likely_logprobs(rng, turn // 2, vocab_size), advantage))
    return data


def _likely_logprobs(rng: np.random.Generator, count: int, vocab_size: int) -> np.ndarray:
    """Return approximately the logprobs of any tokens under a model with random weights."""
    return rng.normal(-np.log(vocab_size), 0.1, count)


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[np.ndarray]:
    """Return distinct prompts; another seed, count or length gives other prompts, so that no cache hits."""
    return list(np.random.default_rng([count, length, seed]).integers(0, vocab_size, (count, length)))


def group_advantages(num_groups: int, size: int, seed: int) -> np.ndarray:
    """Return random rewards minus the mean of their group, ``(groups, size)``."""
    rewards = np.random.default_rng(seed).normal(size=(num_groups, size))
    return rewards - rewards.mean(1, keepdims=True)


def samples_as_data(prompt: np.ndarray, samples: list[SampledSequence], advantages: np.ndarray) -> list[Datum]:
    """Return the training data of a policy-gradient step: samples of one prompt with the sampler's logprobs."""
    return [
        _rl_datum(np.concatenate([prompt, sample.tokens]), sample.logprobs, float(advantage))
        for sample, advantage in zip(samples, advantages, strict=True)
    ]


def num_tokens(data: list[Datum]) -> int:
    return sum(len(datum.tokens) for datum in data)


def unique_fraction(data: list[Datum]) -> float:
    """Return the fraction of tokens that are left if equal prefixes are counted once."""
    prefixes = {datum.tokens[: i + 1].tobytes() for datum in data for i in range(len(datum.tokens))}
    return len(prefixes) / num_tokens(data)


def loss_scale(data: list[Datum]) -> float:
    """Return the scale of a loss: the sum of the absolute weights or advantages."""
    names = ("weights", "advantages")
    return float(sum(np.abs(d.loss_fn_inputs[name]).sum() for d in data for name in names if name in d.loss_fn_inputs))


def _rl_datum(text: np.ndarray, logprobs: np.ndarray, advantage: float) -> Datum:
    """``logprobs`` belong to the last tokens of ``text``; the ones before are the prompt."""
    length, completion = len(text) - 1, len(logprobs)
    old, advantages = np.zeros((2, length), np.float32)
    old[-completion:], advantages[-completion:] = logprobs, advantage
    inputs: dict[str, np.ndarray] = {
        "target_tokens": text[1:].astype(np.int64),
        "logprobs": old,
        "advantages": advantages,
    }
    return Datum(tokens=text[:-1].astype(np.int64), loss_fn_inputs=inputs)
