"""Completers: what continues a prompt, on the level of tokens or of messages.

RL works on tokens and their logprobs, judges and opponents mostly on messages; both sit on one sampling client. Every
draw of a completer with a seed derives from that seed and the number of the call, so a run can be repeated.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from lorimer import SamplingClient
from lorimer.chat.conversation import Message
from lorimer.cookbook.renderers import Renderer
from lorimer.types import ModelInput, SampledSequence, SamplingParams, StopReason

StopCondition: TypeAlias = list[str] | list[int]
"""Texts or token ids that end a continuation; an empty list is nothing but ``max_tokens``."""


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits that depends on all parts, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class TokensWithLogprobs:
    """A sampled continuation; ``length`` as its stop reason means that ``max_tokens`` cut it."""

    tokens: list[int]
    maybe_logprobs: list[float] | None
    stop_reason: StopReason = "stop"

    @property
    def logprobs(self) -> list[float]:
        if self.maybe_logprobs is None:
            raise ValueError("these tokens came without logprobs, which training needs")
        return self.maybe_logprobs

    @classmethod
    def of(cls, sequence: SampledSequence) -> "TokensWithLogprobs":
        return cls(sequence.tokens, sequence.logprobs, sequence.stop_reason)


class TokenCompleter(Protocol):
    """Continues tokens: anything with this one method can play an environment."""

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs: ...


class MessageCompleter(Protocol):
    """Answers a conversation."""

    async def __call__(self, messages: Sequence[Message]) -> Message: ...


@dataclass
class TinkerTokenCompleter:
    """Continues tokens by sampling; a call's ``max_tokens`` can only lower the completer's own."""

    sampling_client: SamplingClient
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    """Call n draws from a seed of (seed, n); without one every draw is new."""
    _num_calls: int = field(default=0, init=False, repr=False)

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return (await self.sample(model_input, stop, 1, max_tokens=max_tokens))[0]

    async def sample(
        self, model_input: ModelInput, stop: StopCondition, num_samples: int, *, max_tokens: int | None = None
    ) -> list[TokensWithLogprobs]:
        """Several continuations of one prompt, in one request that reads the prompt once."""
        params = SamplingParams(
            max_tokens=self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens),
            temperature=self.temperature,
            stop=stop,
            seed=None if self.seed is None else derive_seed(self.seed, self._num_calls),
        )
        self._num_calls += 1
        response = await self.sampling_client.sample_async(model_input, num_samples, params)
        return [TokensWithLogprobs.of(sequence) for sequence in response.sequences]


class TinkerMessageCompleter:
    """Answers a conversation by sampling: an opponent, a judge, a teacher."""

    def __init__(
        self,
        sampling_client: SamplingClient,
        renderer: Renderer,
        max_tokens: int,
        stop_condition: StopCondition | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> None:
        self.renderer = renderer
        self.stop_condition = renderer.get_stop_sequences() if stop_condition is None else stop_condition
        self._complete = TinkerTokenCompleter(sampling_client, max_tokens, temperature, seed)

    async def __call__(self, messages: Sequence[Message]) -> Message:
        prompt = self.renderer.build_generation_prompt(messages)
        sampled = await self._complete(prompt, self.stop_condition)
        message, _ = self.renderer.parse_response(sampled.tokens)
        return message
