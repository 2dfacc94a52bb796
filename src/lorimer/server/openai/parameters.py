"""Bodies of other people's APIs: known parameters are checked, unknown ones refused by name.

Clients send parameters at the value that means "off"; those are accepted, and any other value is refused. A few
say only who asks, and have no effect.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from lorimer.server.bodies import off_loop, read_checked_json
from lorimer.server.body_limits import chat_limits
from lorimer.server.context import context_of
from lorimer.server.decoding import describe, field_path
from lorimer.server.errors import Refusal

Body = TypeVar("Body", bound=BaseModel)
_FIELD = re.compile(r"(?!(?:str|int|float|bool)$)[a-z_]+")

WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
}
OFF: Mapping[str, Sequence[object]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "moderation": (),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters that are not available, and the values with which they are accepted."""


class BadParameter(Refusal):
    """A parameter that is wrong, unknown or not available."""

    def __init__(self, param: str, detail: str, code: str = "invalid_parameter", status: int = 400) -> None:
        super().__init__(status, code, detail)
        self.param = param


async def read_parameters(request: Request, model: type[Body]) -> Body:
    """The body as ``model``; a parameter that is null counts as absent."""
    limits = chat_limits(context_of(request).settings)
    data = await read_checked_json(request, limits)
    return await off_loop(len(data), lambda: check_parameters(orjson.loads(data), model))


def check_parameters(raw: object, model: type[Body]) -> Body:
    if not isinstance(raw, dict):
        raise BadParameter("", "the body is not a JSON object")
    given = {name: value for name, value in raw.items() if value is not None and name not in WITHOUT_EFFECT}
    for name, accepted in OFF.items():
        if name in given and name not in model.model_fields:
            value = given.pop(name)
            if value not in accepted:
                only = f"; accepted is {' or '.join(map(repr, accepted))}" if accepted else ""
                detail = f"parameter {name!r} is not available{only}"
                raise BadParameter(name, detail, "unsupported_parameter")
    unknown = next((name for name in given if name not in model.model_fields), None)
    if unknown is not None:
        known = ", ".join(sorted(model.model_fields))
        raise BadParameter(
            unknown, f"parameter {unknown[:100]!r} is not known; accepted are {known}", "unknown_parameter"
        )
    try:
        return model.model_validate(given)
    except ValidationError as error:
        place = error.errors(include_url=False, include_input=False, include_context=False)[0]["loc"]
        raise BadParameter(_param(place), describe(error)) from None


def _param(place: tuple[int | str, ...]) -> str:
    """The path of a field, without the alternatives of a union that were tried below it."""
    parts = list(takewhile(lambda part: isinstance(part, int) or _FIELD.fullmatch(part), place))
    return field_path(tuple(parts))
