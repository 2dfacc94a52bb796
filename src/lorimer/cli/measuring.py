"""What ``lorimer bench`` measures: a run as a user's program makes it, through the SDK."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorimer import SamplingClient, ServiceClient, TrainingClient, types

SEQUENCES, PROMPT_TOKENS, SAMPLE_TOKENS = 8, 32, 32
IN_FLIGHT = 2
"""Steps that are submitted before the first is awaited, as a well-written loop does."""
CALLS = 30


class Bench:
    """Measurements of one base model; each takes about the seconds it is given, and at least one round."""

    def __init__(self, service: "ServiceClient", model: str, rank: int, sequence_tokens: int) -> None:
        self.service = service
        self.training: TrainingClient = service.create_lora_training_client(model, rank=rank, seed=0)
        self.sequence_tokens = sequence_tokens

    def train(self, seconds: float) -> float:
        """Tokens of supervised training a second: passes and steps, pipelined."""
        data = [datum(self.sequence_tokens, number) for number in range(SEQUENCES)]
        self.step(data)()
        waiting: deque[Callable[[], None]] = deque()
        start, steps = time.monotonic(), 0
        while not steps or time.monotonic() - start < seconds:
            while len(waiting) < IN_FLIGHT:
                waiting.append(self.step(data))
            waiting.popleft()()
            steps += 1
        elapsed = time.monotonic() - start
        for wait in waiting:
            wait()
        return steps * SEQUENCES * self.sequence_tokens / elapsed

    def step(self, data: "list[types.Datum]") -> Callable[[], None]:
        """Submit a pass and a step; what is returned waits for them."""
        from lorimer import types

        passed = self.training.forward_backward(data, "cross_entropy")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=1e-4))

        def wait() -> None:
            passed.result()
            stepped.result()

        return wait

    def sampler(self) -> "SamplingClient":
        return self.training.save_weights_and_get_sampling_client()

    def sample(self, sampler: "SamplingClient", prompts: int, samples: int, seconds: float) -> float:
        """Tokens sampled a second: ``prompts`` requests concurrently, each for ``samples`` sequences."""
        from lorimer import types

        params = types.SamplingParams(max_tokens=SAMPLE_TOKENS, stop=[])
        rounds = 0

        def ask() -> None:
            asked = [
                sampler.sample(types.ModelInput.from_ints(tokens(PROMPT_TOKENS, 100 * rounds + i)), samples, params)
                for i in range(prompts)
            ]
            for future in asked:
                future.result()

        ask()
        start = time.monotonic()
        while not rounds or time.monotonic() - start < seconds:
            rounds += 1
            ask()
        return rounds * prompts * samples * SAMPLE_TOKENS / (time.monotonic() - start)

    def operation_seconds(self) -> list[float]:
        """How long the smallest operation takes there and back, one after the other."""
        smallest = [datum(2, 0)]
        return [timed(lambda: self.training.forward(smallest, "cross_entropy").result()) for _ in range(CALLS)]

    def request_seconds(self) -> list[float]:
        """How long a request takes that computes nothing."""
        return [timed(self.service.get_server_capabilities) for _ in range(CALLS)]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tokens(count: int, seed: int) -> list[int]:
    """Ids that every vocabulary has; each seed gives others, so that no prompt is in a cache."""
    return [3 + (7 * i + 31 * seed + i * i * (seed + 1)) % 200 for i in range(count)]


def datum(count: int, seed: int) -> "types.Datum":
    from lorimer import types

    found = tokens(count + 1, seed)
    return types.Datum(
        model_input=types.ModelInput.from_ints(found[:-1]),
        loss_fn_inputs={"target_tokens": found[1:], "weights": [1.0] * count},  # type: ignore[dict-item]
    )


def median_ms(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds)


def slow_ms(seconds: list[float]) -> float:
    """Nine of ten are faster."""
    return 1000 * statistics.quantiles(seconds, n=10)[-1]
