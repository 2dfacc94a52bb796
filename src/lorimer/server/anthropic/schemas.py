"""What clients of Anthropic's Messages API send, as far as it is served here."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StrictBool, field_validator, model_validator

from lorimer.server.openai.schemas import Count, Effort, Sent

CacheControl = dict[str, JsonValue]
"""Accepted and without effect: prefixes are cached by themselves."""
ACCEPTED_BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


class TextBlock(Sent):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = Field(default={})
    citations: list[JsonValue] = Field(default=[])


class ImageSource(Sent):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg"]
    data: str

    @model_validator(mode="before")
    @classmethod
    def _holds_the_image(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("type") != "base64":
            kind = str(values.get("type"))[:100]
            raise ValueError(f"an image of source type {kind!r} is not opened; accepted is 'base64'")
        return values


class ImageBlock(Sent):
    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl = Field(default={})


class ThinkingBlock(Sent):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Sent):
    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Sent):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue] = Field(default={})
    cache_control: CacheControl = Field(default={})


class ToolResultBlock(Sent):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: StrictBool = False
    cache_control: CacheControl = Field(default={})


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(Sent):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @field_validator("content", mode="before")
    @classmethod
    def _known_blocks(cls, content: Any) -> Any:
        for index, block in enumerate(content if isinstance(content, list) else []):
            kind = block.get("type") if isinstance(block, dict) else block
            if kind not in ACCEPTED_BLOCKS:
                accepted = ", ".join(ACCEPTED_BLOCKS)
                raise ValueError(f"block {index} is of type {str(kind)[:100]!r}; accepted are {accepted}")
        return content

    @property
    def blocks(self) -> list[Any]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class Tool(Sent):
    name: str
    type: Literal["custom"] = "custom"
    description: str = ""
    input_schema: dict[str, JsonValue] = Field(default={})
    cache_control: CacheControl = Field(default={})


class ToolChoice(Sent):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: StrictBool = False


class Thinking(Sent):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int = 0
    """Accepted and without effect: ``max_tokens`` is the only limit."""
    display: str = ""


class OutputConfig(Sent):
    effort: Effort | None = None


class CountRequest(Sent):
    """What there is to count."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: list[Tool] = Field(default=[])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    max_tokens: Count
    stream: StrictBool = False
    stop_sequences: list[str] = Field(default=[])
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1)] = -1
