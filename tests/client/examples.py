"""Data for the tests of the SDK."""

import numpy as np

from lorimer import types

VOCAB_SIZE = 272


def tokens_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def datum(length: int = 9, seed: int = 0) -> types.Datum:
    tokens = tokens_of(length + 1, seed)
    weights = np.random.default_rng(seed).choice([0.5, 1.0], length).tolist()
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


def batch(count: int = 3) -> list[types.Datum]:
    return [datum(5 + 3 * index, index) for index in range(count)]


def logprobs(output: types.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([one["logprobs"].to_numpy() for one in output.loss_fn_outputs])


def weighted_sum(data: list[types.Datum], output: types.ForwardBackwardOutput) -> float:
    weights = np.concatenate([item.loss_fn_inputs["weights"].to_numpy() for item in data])
    return float(-(logprobs(output).astype(np.float64) * weights).sum())


def prompt(length: int = 6, seed: int = 1) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens_of(length, seed))
