"""Messages of a sampler about its requests: progress for each token, and the result at the end."""

from typing import TYPE_CHECKING

import numpy as np

from lorimer.engine.messages import SampledSequence, SampleProgress, SampleResult, TopkLogprobs

if TYPE_CHECKING:
    from lorimer.engine.sampling.sampler import Request, Sequence


def progress(sequence: "Sequence") -> SampleProgress:
    """Build the progress message for the token just drawn."""
    return SampleProgress(
        request_id=sequence.request.message.request_id,
        index=sequence.index,
        tokens=sequence.tokens[-1:],
        logprobs=sequence.logprobs[-1:],
        topk_logprobs=_topk(sequence.best[-1:]),
        stop_reason=sequence.stop_reason,
    )


def result(request: "Request") -> SampleResult:
    """Build the result of a finished request: its sequences, and the prompt scores it asked for."""
    sequences = [
        SampledSequence(
            tokens=np.array(sequence.tokens, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            stop_reason=sequence.stop_reason or "length",
            topk_logprobs=_topk(sequence.best),
        )
        for sequence in request.sequences
    ]
    scores = {} if request.scores is None else request.scores.result()
    return SampleResult(
        sequences=sequences,
        prompt_cache_hit_tokens=request.num_cached,
        prompt_tokens=len(request.message.prompt),
        **scores,
    )


def _topk(best: list[tuple[np.ndarray, np.ndarray]]) -> TopkLogprobs | None:
    """Stack the alternatives; return ``None`` if none were asked for."""
    if not best:
        return None
    return TopkLogprobs(
        token_ids=np.stack([ids for ids, _ in best]).astype(np.int32),
        logprobs=np.stack([values for _, values in best]).astype(np.float32),
    )
