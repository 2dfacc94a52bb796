"""Translates between the engine's sample messages and vLLM's ``/v1/completions``.

Logprobs of samples are vLLM's ``processed_logprobs``: those of the temperature-scaled distribution, like the engine's.
Prompts are not scored: vLLM 0.32 takes the unembedding factors of their rows from other requests of the batch.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lorimer.engine.config import TEMPERATURES
from lorimer.engine.messages import SampledSequence, SampleProgress, SampleRequest, SampleResult, TopkLogprobs
from lorimer.errors import EngineError, Unsupported


def refuse_inexact(request: SampleRequest) -> None:
    """Raise `Unsupported` for what vLLM does not answer as the engine does. The scheduler sends such to the engine."""
    params = request.params
    needs = {
        "temperature": params.temperature != 0 and not TEMPERATURES[0] <= params.temperature <= TEMPERATURES[1],
        "top_k": params.top_k > 0,
        "top_p": params.top_p < 1,
        "prompt_logprobs": request.prompt_logprobs,
        "topk_prompt_logprobs": request.topk_prompt_logprobs > 0,
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k > 0,
        "grammar": bool(request.grammar),
        "images": bool(request.images),
    }
    if lacking := [name for name, is_needed in needs.items() if is_needed]:
        raise Unsupported(f"{', '.join(lacking)} cannot be answered exactly by vLLM; the engine answers it")


def completion_body(
    request: SampleRequest, adapter: str, stop_ids: list[int], max_context: int, *, is_streamed: bool
) -> dict[str, Any]:
    """Return the body of a request for all samples, or for a single one, which is streamed.

    ``stop_ids`` are all the tokens that end a sequence. The seed is left out: vLLM 0.32 on a CPU dies of one when it
    computes a prompt in several parts.
    """
    params, length = request.params, len(request.prompt)
    salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
    return {
        "model": adapter,
        "prompt": np.asarray(request.prompt).tolist(),
        "n": 1 if is_streamed or not params.temperature else request.num_samples,  # greedy samples are all the same
        "stream": is_streamed,
        "max_tokens": params.max_tokens or max_context - length,
        "temperature": params.temperature,
        "logprobs": request.topk_sample_logprobs,
        "stop_token_ids": stop_ids,
        "ignore_eos": True,  # they are among the stop tokens, unless nothing stops
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **salt,
    }


@dataclass
class Collected:
    """The tokens of one sequence that have arrived."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[tuple[list[int], list[float]]] = field(default_factory=list)
    stop_reason: str | None = None

    def add(self, choice: dict[str, Any], num_best: int) -> int:
        """Add the tokens of a choice, or of a piece of it, and return how many they are."""
        tokens, logprobs = choice["token_ids"] or [], choice["logprobs"]
        if tokens:
            if logprobs is None or len(logprobs["token_logprobs"]) != len(tokens):
                raise EngineError(f"vLLM returned {len(tokens)} tokens without their logprobs")
            self.tokens += tokens
            self.logprobs += logprobs["token_logprobs"]
            if num_best:
                self.best += [best_of(found, num_best) for found in logprobs["top_logprobs"]]
        if (reason := choice.get("finish_reason")) is not None:
            if reason not in ("stop", "length"):
                raise EngineError(f"vLLM ended a sequence for the reason {reason!r}")
            self.stop_reason = reason
        return len(tokens)

    def cut(self, length: int) -> None:
        """Drop the tokens after the first ``length``, which complete a stop."""
        self.stop_reason = "stop"
        for kept in (self.tokens, self.logprobs, self.best):
            del kept[length:]

    def sequence(self) -> SampledSequence:
        assert self.stop_reason is not None
        return SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            stop_reason="stop" if self.stop_reason == "stop" else "length",
            topk_logprobs=to_topk(self.best),
        )

    def progress(self, request_id: str, index: int, first: int) -> SampleProgress:
        """Return the message about the tokens from number ``first`` on."""
        reason = self.stop_reason
        return SampleProgress(
            request_id=request_id,
            index=index,
            tokens=self.tokens[first:],
            logprobs=self.logprobs[first:],
            topk_logprobs=to_topk(self.best[first:]),
            stop_reason=None if reason is None else "stop" if reason == "stop" else "length",
        )


def best_of(found: dict[str, float], num_best: int) -> tuple[list[int], list[float]]:
    """Return the best tokens and their logprobs. vLLM adds the sampled one where it is not among them."""
    ranked = sorted(found.items(), key=lambda entry: -entry[1])[:num_best]
    return [int(name.removeprefix("token_id:")) for name, _ in ranked], [value for _, value in ranked]


def to_topk(best: list[tuple[list[int], list[float]]]) -> TopkLogprobs | None:
    if not best:
        return None
    return TopkLogprobs(
        token_ids=np.array([tokens for tokens, _ in best], np.int32),
        logprobs=np.array([values for _, values in best], np.float32),
    )


def to_result(request: SampleRequest, sequences: list[Collected], usage: dict[str, Any] | None) -> SampleResult:
    details = (usage or {}).get("prompt_tokens_details") or {}
    return SampleResult(
        sequences=[collected.sequence() for collected in sequences],
        prompt_cache_hit_tokens=details.get("cached_tokens") or 0,
        prompt_tokens=len(request.prompt),
    )
