"""Proves at start that requests with different adapters do not disturb one another in one batch of vLLM.

vLLM 0.32 on a CPU computes requests without an adapter, beside others, with the weights of an adapter. So the base
model is always asked as an adapter of zeros, and this check shows for the installed version and device that it works.
"""

import asyncio
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorimer.engine.vllm.base_files import BaseFiles
from lorimer.engine.vllm.routes import BASE, Vllm
from lorimer.errors import ModelRefused

OTHER = "lorimer-check"
_SCALE = 0.5
_NUM_PROMPTS, _PROMPT_LENGTH, _NUM_SAMPLED = 6, 16, 8
TOLERANCES = {torch.float32: 1e-4}
ROUGH_TOLERANCE = 0.5
"""In a lower precision logprobs depend on the shape of the batch; another adapter's weights change them by far more."""


async def check_mixed_batch(vllm: Vllm, base: BaseFiles, folder: Path, dtype: torch.dtype) -> None:
    """Raise `ModelRefused` unless adapters give the same logprobs in a mixed batch as alone. Load the one of zeros."""
    for name, scale in ((BASE, 0.0), (OTHER, _SCALE)):
        base.write_adapter(folder / name, scale)
        await vllm.load_adapter(name, folder / name)
    await compare(vllm, base, (BASE, OTHER), TOLERANCES.get(dtype, ROUGH_TOLERANCE))
    await vllm.unload_adapter(OTHER)


async def compare(vllm: Vllm, base: BaseFiles, names: tuple[str, str], tolerance: float) -> None:
    """Raise `ModelRefused` unless two adapters differ from each other, and not in a mixed batch from alone."""
    cases = [(name, number) for number in range(_NUM_PROMPTS) for name in names]
    alone = {case: await _sample(vllm, base, *case) for case in cases}
    if all(_tokens(alone[names[0], number]) == _tokens(alone[names[1], number]) for number in range(_NUM_PROMPTS)):
        raise ModelRefused(f"{base.source.name!r} samples the same in vLLM with and without an adapter")
    mixed = dict(zip(cases, await asyncio.gather(*(_sample(vllm, base, *case) for case in cases)), strict=True))
    worst = {of: max(_gap(alone[case], mixed[case]) for case in cases if case[0] == of) for of in names}
    if not max(worst.values()) <= tolerance:
        raise ModelRefused(
            f"logprobs of {base.source.name!r} in vLLM differ between one adapter alone and a mixed batch by"
            f" {worst[names[0]]:.2g} for the base and {worst[names[1]]:.2g} for an adapter; in {base.info.dtype}"
            f" {tolerance:g} is accepted"
        )


def _tokens(sampled: list[tuple[int, float]]) -> list[int]:
    return [token for token, _ in sampled]


def _gap(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> float:
    """Return the largest difference of logprobs, up to and with the first token that differs."""
    pairs = list(zip(one, other, strict=True))
    num_same = len(list(takewhile(lambda pair: pair[0][0] == pair[1][0], pairs)))
    return max(abs(a - b) for (_, a), (_, b) in pairs[: num_same + 1])


async def _sample(vllm: Vllm, base: BaseFiles, adapter: str, number: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens after a random prompt, with their logprobs."""
    length = max(1, min(_PROMPT_LENGTH, base.info.max_context - _NUM_SAMPLED))
    body = {
        "model": adapter,
        "prompt": np.random.default_rng(number).integers(0, base.info.vocab_size, length).tolist(),
        "max_tokens": _NUM_SAMPLED,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    choice: dict[str, Any] = (await vllm.complete(body))["choices"][0]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))
