"""Sampling from copies of full weights: each published copy has a sampler, and they take turns.

A pass computes with one set of weights, so sequences of different copies are never in one batch. A copy has key/value
caches of its own, which end with it. It stands where the engine has one sampler for all adapters.
"""

from collections.abc import Callable

from lorimer.engine.full.full_run import PublishedWeights
from lorimer.engine.messages import Reply, SampleRequest
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.vision import SequenceImages
from lorimer.engine.sampling.sampler import Sampler
from lorimer.errors import Unsupported


class FullSampler:
    def __init__(self, model: BaseModel, new_sampler: Callable[[], Sampler]) -> None:
        self._model, self._new_sampler = model, new_sampler
        self._samplers: dict[PublishedWeights, Sampler] = {}
        """The copies that have requests, or had some, the one computed last at the end."""
        self._dropped: set[PublishedWeights] = set()
        """Copies that end with the last of their requests."""
        self._past = [0, 0, 0]
        """Tokens sampled, computed and found in caches by copies that have ended."""

    @property
    def is_idle(self) -> bool:
        return all(sampler.is_idle for sampler in self._samplers.values())

    @property
    def num_running(self) -> int:
        return sum(sampler.num_running for sampler in self._samplers.values())

    @property
    def num_waiting(self) -> int:
        return sum(sampler.num_waiting for sampler in self._samplers.values())

    @property
    def num_sampled(self) -> int:
        return self._past[0] + sum(sampler.num_sampled for sampler in self._samplers.values())

    @property
    def num_prefilled(self) -> int:
        return self._past[1] + sum(sampler.num_prefilled for sampler in self._samplers.values())

    @property
    def num_cached(self) -> int:
        return self._past[2] + sum(sampler.num_cached for sampler in self._samplers.values())

    def add(
        self, message: SampleRequest, weights: PublishedWeights | None, images: SequenceImages | None = None
    ) -> None:
        """Enqueue a validated request; ``step`` computes and answers it."""
        if weights is None:
            raise Unsupported(
                "this engine trains the weights of its model, so it does not sample the base; another engine does"
            )
        if weights not in self._samplers:
            self._samplers[weights] = self._new_sampler()
        self._samplers[weights].add(message, None, images)

    def step(self) -> list[Reply]:
        """Compute one pass with the copy that has waited longest."""
        weights = next(weights for weights, sampler in self._samplers.items() if not sampler.is_idle)
        sampler = self._samplers.pop(weights)
        self._samplers[weights] = sampler
        with self._model.with_weights(weights.weights):
            replies = sampler.step()
        self._end_dropped()
        return replies

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; return false if it is not in progress."""
        return any(sampler.cancel(request_id) for sampler in self._samplers.values())

    def fail_all(self, error: Exception) -> list[Reply]:
        return [reply for sampler in self._samplers.values() for reply in sampler.fail_all(error)]

    def drop(self, weights: PublishedWeights) -> None:
        """Forget a copy; its requests finish."""
        if weights in self._samplers:
            self._dropped.add(weights)
            self._end_dropped()

    def _end_dropped(self) -> None:
        for weights in [one for one in self._dropped if self._samplers[one].is_idle]:
            self._dropped.remove(weights)
            sampler = self._samplers.pop(weights)
            counts = sampler.num_sampled, sampler.num_prefilled, sampler.num_cached
            self._past = [old + new for old, new in zip(self._past, counts, strict=True)]
