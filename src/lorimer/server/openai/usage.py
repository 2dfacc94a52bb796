"""How many tokens a request took, in the words of OpenAI."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    num_prompt: int
    num_cached: int
    """Of the prompt, found in the prefix cache."""
    num_sampled: int
    num_thought: int = 0

    def shown(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_sampled,
            "total_tokens": self.num_prompt + self.num_sampled,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_thought},
        }
