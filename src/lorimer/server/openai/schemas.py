"""What clients of OpenAI's API send, as far as it is served here."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    StrictBool,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from lorimer.types.base import stop_at_first_error, with_one_unknown

Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Sent(BaseModel):
    """Unknown fields are refused; null is absent."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return stop_at_first_error(handler(source))

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return with_one_unknown(cls, {name: value for name, value in values.items() if value is not None})
        return values


class StreamOptions(Sent):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False
    """Accepted and without effect: nothing is padded."""


class Sampling(Sent):
    """What completions and chat have in common."""

    model: str
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] = 1
    stop: str | list[str] | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1)] = -1

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]


class CompletionRequest(Sampling):
    prompt: str | list[Token] | list[str] | list[list[Token]]
    max_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 16
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    echo: StrictBool = False


class Function(Sent):
    name: str
    description: str = ""
    parameters: dict[str, JsonValue] = {}
    strict: StrictBool = False
    """Accepted and without effect: a call that a grammar made is always within its schema."""


class Tool(Sent):
    type: Literal["function"]
    function: Function


class CalledFunction(Sent):
    name: str
    arguments: str = "{}"


class ToolCall(Sent):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0


class TextPart(Sent):
    type: Literal["text"]
    text: str


class ImageUrl(Sent):
    url: str
    detail: Literal["auto", "high", "original"] = "auto"
    """Accepted and without effect: a model reads an image as it was sent."""


class ImagePart(Sent):
    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
ACCEPTED_PARTS = ("text", "image_url")


class Message(Sent):
    """One message; fields that only repeat an earlier answer are accepted and not read."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] = ""
    name: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    refusal: str = ""
    annotations: list[JsonValue] = []

    @field_validator("content", mode="before")
    @classmethod
    def _known_parts(cls, content: Any) -> Any:
        for index, part in enumerate(content if isinstance(content, list) else []):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind not in ACCEPTED_PARTS:
                accepted = " and ".join(map(repr, ACCEPTED_PARTS))
                raise ValueError(f"part {index} is of type {str(kind)[:100]!r}; accepted are {accepted}")
        return content

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


class ChosenFunction(Sent):
    name: str


class ChosenTool(Sent):
    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Sent):
    name: str = ""
    description: str = ""
    json_schema: dict[str, JsonValue] = Field(default={}, alias="schema")
    strict: StrictBool = False
    """Accepted and without effect: the schema always holds."""


class ResponseFormat(Sent):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: StrictBool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, JsonValue] = {}
