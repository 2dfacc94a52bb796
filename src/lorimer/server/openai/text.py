"""The text side of a served model: its tokenizer and chat templates, read from the directory that its engine names.

Loaded with ``tokenizers`` and Jinja alone: the API process has neither torch nor transformers.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from tokenizers import Tokenizer

from lorimer.chat.templates import DEFAULT, WITH_TOOLS, ChatTemplate, read_templates
from lorimer.errors import TooLarge, Unsupported
from lorimer.server.context import context_of
from lorimer.server.openai.detokenizing import TokenBytes
from lorimer.server.openai.parameters import BadParameter

NO_TEMPLATE = "no_chat_template"
"""By this code a client knows that a model only completes text."""
MAX_CHARS = 4 * 2**20
"""Of one prompt."""


@dataclass(frozen=True)
class TextModel:
    name: str
    tokenizer: Tokenizer
    tokens: TokenBytes
    templates: dict[str, ChatTemplate]
    eos_token_ids: tuple[int, ...]
    max_context: int
    no_images: str = ""
    """Why the model reads no images; empty if it does."""
    image_token: int | None = None
    """What its chat template writes where an image belongs."""

    @classmethod
    def load(
        cls, name: str, directory: Path, eos_token_ids: list[int], max_context: int, no_images: str
    ) -> "TextModel":
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise Unsupported(f"model {name!r} has no tokenizer.json, so it can be sampled by token ids only")
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        templates = read_templates(directory)
        image_token = None if no_images else _image_token(directory / "config.json")
        eos = tuple(eos_token_ids)
        return cls(name, tokenizer, TokenBytes(tokenizer), templates, eos, max_context, no_images, image_token)

    def template(self, has_tools: bool) -> ChatTemplate:
        found = self.templates.get(WITH_TOOLS) if has_tools else None
        found = found or self.templates.get(DEFAULT)
        if found is None:
            detail = f"model {self.name!r} has no chat template; completions take its prompts as text"
            raise BadParameter("model", detail, NO_TEMPLATE)
        return found

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > MAX_CHARS:
            raise TooLarge(f"the prompt has {len(text)} characters; at most {MAX_CHARS} are accepted")
        # A batch of one, because only batches leave other threads their turn meanwhile.
        return list(self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def added_token(self, text: str) -> int | None:
        """The number of a token that stands for exactly this text and is not made of smaller ones."""
        number = self.tokenizer.token_to_id(text)
        return number if number in self.tokenizer.get_added_tokens_decoder() else None


def _image_token(file: Path) -> int | None:
    config = json.loads(file.read_text("utf-8"))
    found: int | None = config.get("image_token_id", config.get("image_token_index"))
    return found


class TextModels:
    """Those that have been asked for, by name and directory."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str], asyncio.Future[TextModel]] = {}

    async def get(
        self, name: str, directory: str, eos_token_ids: list[int], max_context: int, no_images: str
    ) -> TextModel:
        key = (name, directory)
        if key not in self._loaded:
            loading = asyncio.to_thread(TextModel.load, name, Path(directory), eos_token_ids, max_context, no_images)
            self._loaded[key] = asyncio.ensure_future(loading)
        try:
            return await asyncio.shield(self._loaded[key])
        except Exception:
            self._loaded.pop(key, None)
            raise


async def text_model(request: Request, base_model: str) -> TextModel:
    """The text side of a served model; starts its engine if need be."""
    state = request.app.state
    if not hasattr(state, "text_models"):
        state.text_models = TextModels()
    info = await context_of(request).scheduler.model_info(base_model)
    models: TextModels = state.text_models
    return await models.get(base_model, info.directory, info.eos_token_ids, info.max_context, info.no_images)
