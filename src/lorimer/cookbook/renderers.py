"""Renderers: messages to tokens and back, for sampling and for training.

``TemplateRenderer`` speaks the chat template that comes with a tokenizer and so fits any chat model exactly;
``TextRenderer`` writes plain dialogue for base models that have no template. A model that neither serves gets a
renderer of its own by ``register_renderer``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lorimer import ModelInput
from lorimer.cookbook.messages import Message, Termination, ToolSpec, TrainOn
from lorimer.cookbook.template_renderer import TemplateRenderer
from lorimer.cookbook.text_renderer import TextRenderer
from lorimer.errors import InvalidInput, Unsupported

__all__ = [
    "Example",
    "Renderer",
    "TemplateRenderer",
    "Termination",
    "TextRenderer",
    "TrainOn",
    "get_renderer",
    "register_renderer",
]

Example = tuple[ModelInput, NDArray[np.float32]]
"""A sequence and the weight of each of its tokens."""


class Renderer(Protocol):
    @property
    def tokenizer(self) -> Any:
        """A tokenizer of ``transformers``."""

    @property
    def has_extension_property(self) -> bool:
        """Whether the prompt of a later turn begins with the prompt and the response of every turn before."""

    def build_generation_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] | None = None,
        role: str = "assistant",
        prefill: str | None = None,
    ) -> ModelInput:
        """What the model reads before it speaks as ``role``; ``prefill`` is how its message begins."""

    def build_supervised_example(
        self,
        messages: Sequence[Message],
        train_on: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
        tools: Sequence[ToolSpec] | None = None,
    ) -> Example:
        """One sequence with all that ``train_on`` asks for; refused where no single sequence has it."""

    def build_supervised_examples(
        self,
        messages: Sequence[Message],
        train_on: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[Example]:
        """As few sequences as can be that together have all that ``train_on`` asks for, each message in one of them."""

    def get_stop_sequences(self) -> list[int] | list[str]:
        """What ends a response; for ``SamplingParams.stop``."""

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, Termination]:
        """The message that was sampled, and how it ended."""


Factory = Callable[..., Renderer]
"""Takes the tokenizer, and ``image_processor`` where one is given."""

_FACTORIES: dict[str, Factory] = {
    "template": TemplateRenderer,
    "no_thinking": partial(TemplateRenderer, enable_thinking=False),
    "text": TextRenderer,
}


def register_renderer(name: str, factory: Factory) -> None:
    """Let ``get_renderer(name, tokenizer)`` be ``factory(tokenizer)``; a name can be given once."""
    if name in _FACTORIES or name == "auto":
        raise ValueError(f"the renderer {name!r} is there already; another name is accepted")
    _FACTORIES[name] = factory


def get_renderer(name: str, tokenizer: Any, image_processor: Any = None) -> Renderer:
    """The renderer of that name; ``auto`` is ``template`` if the tokenizer has a chat template, else ``text``.

    With the ``image_processor`` of a model, or its whole processor, images can be trained on.
    """
    if name == "auto":
        name = "template" if getattr(tokenizer, "chat_template", None) else "text"
    if name not in _FACTORIES:
        raise InvalidInput(f"there is no renderer {name!r}; accepted are auto, {', '.join(sorted(_FACTORIES))}")
    if image_processor is None:
        return _FACTORIES[name](tokenizer)
    if _FACTORIES[name] is TextRenderer:
        raise Unsupported("the renderer 'text' has no form for images; one without an image_processor is accepted")
    return _FACTORIES[name](tokenizer, image_processor=image_processor)
