"""A learning rate to begin with, and why.

The rule is Tinker's: LoRA takes about ten times the rate of full fine-tuning whatever its rank, since its product is
scaled by ``alpha / rank``; and wider models take smaller rates, by a power that was fitted for two families. It is a
start: ``recipes/sweep.py`` finds what fits a task.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from lorimer.errors import InvalidInput

FULL_RATE = 5e-5
LORA_FACTOR = 10.0
REFERENCE_WIDTH = 2000
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
"""How the rate falls with the width of a model."""
WIDTHS = {
    "lorimer/tiny": 128, "smollm2-135m": 576, "smollm2-360m": 960, "smollm2-1.7b": 2048,
    "llama-3.2-1b": 2048, "llama-3.2-3b": 3072, "llama-3.1-8b": 4096, "llama-3.1-70b": 8192, "llama-3.3-70b": 8192,
    "qwen3-0.6b": 1024, "qwen3-1.7b": 2048, "qwen3-4b": 2560, "qwen3-8b": 4096, "qwen3-14b": 5120, "qwen3-32b": 5120,
    "qwen3-30b-a3b": 2048, "qwen3-235b-a22b": 4096,
}  # fmt: skip
"""Hidden sizes, by a part of the model's name."""


@dataclass(frozen=True)
class LearningRate:
    value: float
    reason: str

    def __str__(self) -> str:
        return f"learning rate {self.value:.3g}: {self.reason}"


def lora_learning_rate(
    model_name: str, *, hidden_size: int | None = None, directory: str | Path | None = None, is_full: bool = False
) -> LearningRate:
    """The rule's rate for a model, whose width is given, in the config of a directory, or known by name.

    With ``is_full`` it is the rate of full fine-tuning, which the rule begins with.

    The files of a tokenizer (``tokenizer.name_or_path``) have the config where they come from a Lorimer server.
    """
    width = hidden_size or _width_in(Path(directory or model_name)) or _width_by_name(model_name)
    family = "qwen" if "qwen" in model_name.lower() else "llama"
    exponent = EXPONENTS[family]
    value = FULL_RATE * (1.0 if is_full else LORA_FACTOR) * (REFERENCE_WIDTH / width) ** exponent
    known = family in model_name.lower()
    reason = (
        f"{FULL_RATE:g} of full fine-tuning, times {'' if is_full else f'{LORA_FACTOR:g} for LoRA of any rank, times '}"
        f"({REFERENCE_WIDTH} / hidden size {width}) ** {exponent:g}, as fitted for {family.capitalize()} models"
    )
    return LearningRate(value, reason if known else f"{reason}; no fit is known for {model_name!r}, so try others too")


def _width_in(directory: Path) -> int | None:
    config = directory / "config.json"
    if not config.is_file():
        return None
    values = json.loads(config.read_text("utf-8"))
    return values.get("text_config", values).get("hidden_size")  # type: ignore[no-any-return]


def _width_by_name(model_name: str) -> int:
    fitting = [name for name in WIDTHS if name in model_name.lower()]
    if not fitting:
        raise InvalidInput(
            f"the hidden size of {model_name!r} is not known, so no learning rate can be recommended; give one with "
            "--learning-rate (1e-4 to 1e-3 is usual for LoRA), or hidden_size"
        )
    return WIDTHS[max(fitting, key=len)]
