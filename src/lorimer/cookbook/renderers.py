"""Renderers: messages to tokens and back, for sampling and for training.

``TemplateRenderer`` speaks the chat template that comes with a tokenizer and so fits any chat model exactly;
``TextRenderer`` writes plain dialogue for base models that have no template. The names of the official cookbook that
are in ``chat/formats.py`` give its tokens. A model that none of these serves gets a renderer of its own by
``register_renderer``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lorimer import ModelInput
from lorimer.chat.conversation import (
    ContentPart,
    ImagePart,
    Message,
    Role,
    Termination,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    TrainOn,
    UnparsedToolCall,
)
from lorimer.chat.conversation import text_of as get_text_content
from lorimer.chat.deepseek import DeepSeekV3Renderer
from lorimer.chat.deepseek41 import DeepSeekV41Renderer
from lorimer.chat.formats import Llama3Renderer, Qwen3Renderer, Qwen3VLRenderer, RoleColonRenderer
from lorimer.chat.glm import Glm53Renderer
from lorimer.chat.harmony import GptOssRenderer
from lorimer.chat.kimi import KimiK2Renderer, KimiK25Renderer
from lorimer.chat.nemotron import Nemotron3Renderer, Nemotron3UltraRenderer
from lorimer.chat.qwen35 import EFFORTS, Qwen35Renderer, Qwen38Renderer
from lorimer.chat.template_renderer import TemplateRenderer
from lorimer.chat.text_renderer import TextRenderer
from lorimer.errors import InvalidInput, Unsupported

__all__ = [
    "ContentPart",
    "DeepSeekV3Renderer",
    "DeepSeekV41Renderer",
    "Example",
    "Glm53Renderer",
    "GptOssRenderer",
    "ImagePart",
    "KimiK2Renderer",
    "KimiK25Renderer",
    "Llama3Renderer",
    "Message",
    "Nemotron3Renderer",
    "Nemotron3UltraRenderer",
    "ParseTermination",
    "Qwen3Renderer",
    "Qwen3VLRenderer",
    "Qwen35Renderer",
    "Qwen38Renderer",
    "Renderer",
    "Role",
    "RoleColonRenderer",
    "TemplateRenderer",
    "Termination",
    "TextPart",
    "TextRenderer",
    "ThinkingPart",
    "ToolCall",
    "ToolSpec",
    "TrainOn",
    "TrainOnWhat",
    "UnparsedToolCall",
    "get_renderer",
    "get_text_content",
    "register_renderer",
]

TrainOnWhat = TrainOn
ParseTermination = Termination
"""The names that programs of the official cookbook use."""

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
        role: str = "assistant",
        prefill: str | None = None,
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ModelInput:
        """What the model reads before it speaks as ``role``; ``prefill`` is how its message begins."""

    def build_supervised_example(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
        tools: Sequence[ToolSpec] | None = None,
    ) -> Example:
        """One sequence with all that ``train_on_what`` asks for; refused where no single sequence has it."""

    def build_supervised_examples(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_TURN,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[Example]:
        """As few sequences as can be that have all that ``train_on_what`` asks for, each message in one of them."""

    def get_stop_sequences(self) -> list[int] | list[str]:
        """What ends a response; for ``SamplingParams.stop``."""

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        """The message that was sampled, and how it ended."""


Factory = Callable[..., Renderer]
"""Takes the tokenizer, and ``image_processor`` where one is given."""

_FACTORIES: dict[str, Factory] = {
    "template": TemplateRenderer,
    "no_thinking": partial(TemplateRenderer, enable_thinking=False),
    "text": TextRenderer,
    "role_colon": RoleColonRenderer,
    "llama3": Llama3Renderer,
    "qwen3": Qwen3Renderer,
    "qwen3_disable_thinking": partial(Qwen3Renderer, thinking="off"),
    "qwen3_instruct": partial(Qwen3Renderer, thinking="never"),
    "qwen3_5": Qwen35Renderer,
    "qwen3_5_disable_thinking": partial(Qwen35Renderer, is_told_not_to_think=True),
    "qwen3_5_preserve_thinking": partial(Qwen35Renderer, keeps_thoughts=True),
    **{f"qwen3_8_{effort}_reasoning": partial(Qwen38Renderer, effort=effort) for effort in EFFORTS},
    "qwen3_8_disable_thinking": partial(Qwen38Renderer, is_told_not_to_think=True),
    "qwen3_vl": Qwen3VLRenderer,
    "qwen3_vl_instruct": partial(Qwen3VLRenderer, thinking="never"),
    "nemotron3": Nemotron3Renderer,
    "nemotron3_low_thinking": partial(Nemotron3Renderer, effort="low"),
    "nemotron3_disable_thinking": partial(Nemotron3Renderer, is_told_not_to_think=True),
    "nemotron3_preserve_thinking": partial(Nemotron3Renderer, keeps_thoughts=True),
    "nemotron3_ultra": Nemotron3UltraRenderer,
    "nemotron3_ultra_medium_thinking": partial(Nemotron3UltraRenderer, effort="efficient"),
    "nemotron3_ultra_disable_thinking": partial(Nemotron3UltraRenderer, is_told_not_to_think=True),
    "nemotron3_ultra_preserve_thinking": partial(Nemotron3UltraRenderer, keeps_thoughts=True),
    "deepseekv3": DeepSeekV3Renderer,
    "deepseekv3_disable_thinking": DeepSeekV3Renderer,
    "deepseekv3_thinking": partial(DeepSeekV3Renderer, thinks=True),
    "deepseekv4_1": DeepSeekV41Renderer,
    "deepseekv4_1_low_reasoning": partial(DeepSeekV41Renderer, effort="low"),
    "deepseekv4_1_max_reasoning": partial(DeepSeekV41Renderer, effort="max"),
    "deepseekv4_1_disable_thinking": partial(DeepSeekV41Renderer, effort=None),
    "deepseekv4_1_preserve_thinking": partial(DeepSeekV41Renderer, keeps_thoughts=True),
    **{f"glm5_3_{effort}_reasoning": partial(Glm53Renderer, effort=effort) for effort in ("low", "high", "max")},
    "kimi_k2": KimiK2Renderer,
    "kimi_k25": KimiK25Renderer,
    "kimi_k25_disable_thinking": partial(KimiK25Renderer, is_told_not_to_think=True),
    "kimi_k26": KimiK25Renderer,
    "kimi_k26_disable_thinking": partial(KimiK25Renderer, is_told_not_to_think=True),
    "kimi_k26_preserve_thinking": partial(KimiK25Renderer, keeps_thoughts=True),
    "gpt_oss_no_sysprompt": GptOssRenderer,
    **{f"gpt_oss_{effort}_reasoning": partial(GptOssRenderer, effort=effort) for effort in ("low", "medium", "high")},
}
_TEXT_ONLY = tuple(name for name in _FACTORIES if name not in ("template", "no_thinking"))
ELSEWHERE = {"tml_v0": "its format is not in the cookbook but in the package tml_renderers, as compiled code"}
"""The names of the official cookbook that are refused, and why."""


def register_renderer(name: str, factory: Factory) -> None:
    """Let ``get_renderer(name, tokenizer)`` be ``factory(tokenizer)``; a name can be given once."""
    if name in _FACTORIES or name == "auto":
        raise ValueError(f"the renderer {name!r} is there already; another name is accepted")
    _FACTORIES[name] = factory


def get_renderer(name: str, tokenizer: Any, image_processor: Any = None, model_name: str | None = None) -> Renderer:
    """The renderer of that name; ``auto`` is ``template`` if the tokenizer has a chat template, else ``text``.

    With the ``image_processor`` of a model, or its whole processor, images can be trained on. ``model_name`` is taken
    because the official cookbook takes it; no renderer here needs it.
    """
    if name == "auto":
        name = "template" if getattr(tokenizer, "chat_template", None) else "text"
    if name not in _FACTORIES:
        accepted = f"accepted are auto, {', '.join(sorted(_FACTORIES))}"
        if name in ELSEWHERE:
            raise Unsupported(f"the official cookbook's renderer {name!r} is not here: {ELSEWHERE[name]}; {accepted}")
        raise InvalidInput(f"there is no renderer {name!r}; {accepted}")
    if image_processor is None:
        return _FACTORIES[name](tokenizer)
    if name in _TEXT_ONLY:
        raise Unsupported(f"the renderer {name!r} has no form for images; one without an image_processor is accepted")
    return _FACTORIES[name](tokenizer, image_processor=image_processor)
