"""Scores of prompt tokens: their own log probabilities, the best alternatives, given ids, and fresh draws.

Row i of what is computed from position i scores position i + 1; the first position has no score.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.messages import SampleRequest, TopkLogprobs
from lorimer.engine.model.device import download, upload
from lorimer.engine.model.head import Head
from lorimer.engine.sampling.drawing import DrawRules, Rule, best, derive_seed, draw, scaled_logprobs, uniforms
from lorimer.engine.training.batch import AdapterSlice

_ROWS = 64
_PADDING = -99999.0


class PromptScores:
    """The prompt scores that a request asked for, filled piece by piece as the prompt is computed."""

    def __init__(self, message: SampleRequest, is_image: np.ndarray | None = None) -> None:
        """``is_image`` marks positions that hold no text, whose own log probabilities mean nothing."""
        self._message, self._is_image = message, is_image
        length = len(message.prompt)
        self.first_position = 1
        """Positions from here on are scored."""
        if message.prompt_logprobs_last_n is not None and not self._scores_everything:
            self.first_position = length - message.prompt_logprobs_last_n
        self._logprobs = np.full(length, np.nan, np.float32)
        k = message.topk_prompt_logprobs
        self._top_ids, self._top = np.zeros((length, k), np.int32), np.full((length, k), _PADDING, np.float32)
        alternatives = (max(0, length - 1), message.prompt_alt_tokens_k)
        self._drawn_ids, self._drawn = np.zeros(alternatives, np.int32), np.zeros(alternatives, np.float32)
        targets = message.target_prompt_logprobs
        self._given = None if targets is None else np.zeros(targets.shape, np.float32)
        self._seed = derive_seed(message.params.seed or 0, 1 << 40)

    @classmethod
    def wanted(cls, message: SampleRequest, is_image: np.ndarray | None = None) -> "PromptScores | None":
        scores = cls(message, is_image)
        return scores if message.prompt_logprobs or scores._scores_everything else None

    @property
    def _scores_everything(self) -> bool:
        message = self._message
        return bool(message.topk_prompt_logprobs or message.prompt_alt_tokens_k) or (
            message.target_prompt_logprobs is not None
        )

    def add(self, x_NH: Tensor, positions: np.ndarray, head: Head, slices: list[AdapterSlice]) -> None:
        """Score the tokens after ``positions``, whose hidden states are ``x_NH``."""
        wanted = (positions + 1 >= self.first_position) & (positions + 1 < len(self._message.prompt))
        rows = np.flatnonzero(wanted)
        computed: list[list[Tensor]] = []
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            adapters = [replace(s, start=0, stop=len(part)) for s in slices]
            (on_device,) = upload([part], x_NH.device)
            computed.append(self._compute(head.logits(x_NH[on_device], adapters), positions[part] + 1))
        if computed:
            found = download([torch.cat(parts) for parts in zip(*computed, strict=True)])
            self._store(iter(found), positions[rows] + 1)

    def _compute(self, logits_NV: Tensor, positions: np.ndarray) -> list[Tensor]:
        """Compute what was asked for at some positions, in the order in which ``_store`` takes it."""
        message, device = self._message, logits_NV.device
        logprobs_NV = logits_NV.log_softmax(-1)
        found: list[Tensor] = []

        def give(ids: np.ndarray) -> None:
            found.append(logprobs_NV.gather(1, upload([ids.astype(np.int64)], device)[0]))

        if message.prompt_logprobs:
            give(np.asarray(message.prompt)[positions][:, None])
        if message.topk_prompt_logprobs:
            found += best(logprobs_NV, message.topk_prompt_logprobs)
        if message.target_prompt_logprobs is not None:
            give(np.maximum(message.target_prompt_logprobs[positions - 1], 0))
        if message.prompt_alt_tokens_k:
            found += self._draw(logits_NV, positions)
        return found

    def _draw(self, logits_NV: Tensor, positions: np.ndarray) -> list[Tensor]:
        message = self._message
        params = message.params
        rule = Rule(params.temperature, params.top_k, params.top_p)
        rules = DrawRules.of([rule] * len(positions), logits_NV.device)
        logprobs_NV = scaled_logprobs(logits_NV, rules)
        drawn = []
        for k in range(message.prompt_alt_tokens_k):
            numbers = uniforms([derive_seed(self._seed, k)] * len(positions), positions.tolist())
            drawn.append(draw(logprobs_NV, rules, numbers))
        tokens_NK = torch.stack(drawn, 1)
        return [tokens_NK, logprobs_NV.gather(1, tokens_NK)]

    def _store(self, found: Iterator[np.ndarray], positions: np.ndarray) -> None:
        message, n = self._message, self._message.prompt_logprobs_last_n
        reported = positions >= (1 if n is None else len(message.prompt) - n)
        if message.prompt_logprobs:
            self._logprobs[positions[reported]] = next(found)[reported, 0]
            if self._is_image is not None:
                self._logprobs[self._is_image] = np.nan
        if message.topk_prompt_logprobs:
            self._top_ids[positions], self._top[positions] = next(found), next(found)
        if self._given is not None and message.target_prompt_logprobs is not None:
            ids = message.target_prompt_logprobs[positions - 1]
            self._given[positions - 1] = np.where(ids >= 0, next(found), 0)
        if message.prompt_alt_tokens_k:
            self._drawn_ids[positions - 1], self._drawn[positions - 1] = next(found), next(found)

    def result(self) -> dict[str, Any]:
        """Return the fields of a ``SampleResult`` that were asked for."""
        message = self._message
        fields: dict[str, Any] = {}
        if message.prompt_logprobs:
            fields["prompt_logprobs"] = self._logprobs
        if message.topk_prompt_logprobs:
            fields["topk_prompt_logprobs"] = TopkLogprobs(token_ids=self._top_ids, logprobs=self._top)
        if message.prompt_alt_tokens_k:
            fields["prompt_alt_tokens"] = TopkLogprobs(token_ids=self._drawn_ids, logprobs=self._drawn)
        if self._given is not None:
            fields["target_prompt_logprobs"] = self._given
        return fields
