"""Proves at start that requests with different adapters do not disturb one another in one batch of vLLM.

vLLM 0.32 on a CPU computes requests without an adapter, beside others, with the weights of an adapter. So the base
model is always asked as an adapter of zeros, and this check shows for the installed version and device that it works.
"""

import asyncio
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lorimer.engine.model.device import Device
from lorimer.engine.vllm.base_files import BaseFiles
from lorimer.errors import ModelRefused

if TYPE_CHECKING:
    from lorimer.engine.vllm.bridge import Vllm

BASE = "lorimer-zeros"
"""The name of the adapter of zeros."""
_OTHER = "lorimer-check"
_SCALE = 0.5
_NUM_PROMPTS, _PROMPT_LENGTH, _NUM_SAMPLED = 6, 16, 8
TOLERANCES = {torch.float32: 1e-4}
ROUGH_TOLERANCE = 0.5
"""In a lower precision logprobs depend on the shape of the batch; another adapter's weights change them by far more."""


async def check_mixed_batch(vllm: "Vllm", base: BaseFiles, folder: Path, device: Device) -> None:
    """Raise `ModelRefused` unless adapters give the same logprobs in a mixed batch as alone. Load the one of zeros."""
    for name, scale in ((BASE, 0.0), (_OTHER, _SCALE)):
        base.write_adapter(folder / name, scale)
        await vllm.load_adapter(name, folder / name)
    tolerance = TOLERANCES.get(device.dtype, ROUGH_TOLERANCE)
    cases = [(name, number) for number in range(_NUM_PROMPTS) for name in (BASE, _OTHER)]
    alone = {case: await _sample(vllm, base, *case) for case in cases}
    if min(_gap(alone[BASE, number], alone[_OTHER, number]) for number in range(_NUM_PROMPTS)) <= 2 * tolerance:
        raise ModelRefused(f"{base.source.name!r} has the same logprobs in vLLM with and without an adapter")
    mixed = dict(zip(cases, await asyncio.gather(*(_sample(vllm, base, *case) for case in cases)), strict=True))
    worst = {of: max(_gap(alone[case], mixed[case]) for case in cases if case[0] == of) for of in (BASE, _OTHER)}
    if not max(worst.values()) <= tolerance:
        raise ModelRefused(
            f"logprobs of {base.source.name!r} in vLLM differ between one adapter alone and a mixed batch by"
            f" {worst[BASE]:.2g} for the base and {worst[_OTHER]:.2g} for an adapter; in {base.info.dtype}"
            f" {tolerance:g} is accepted"
        )
    await vllm.unload_adapter(_OTHER)


def _gap(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> float:
    """Return the largest difference of logprobs, up to and with the first token that differs."""
    pairs = list(zip(one, other, strict=True))
    num_same = len(list(takewhile(lambda pair: pair[0][0] == pair[1][0], pairs)))
    return max(abs(a - b) for (_, a), (_, b) in pairs[: num_same + 1])


async def _sample(vllm: "Vllm", base: BaseFiles, adapter: str, number: int) -> list[tuple[int, float]]:
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
