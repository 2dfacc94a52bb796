"""Base models by the names clients call them."""

from lorimer.errors import NotFound
from lorimer.server.context import Context
from lorimer.server.routes.ownership import quote_id


def check_served(context: Context, base_model: str) -> None:
    names = [model.name for model in context.scheduler.served_models()]
    if base_model not in names:
        accepted = ", ".join(map(repr, names))
        raise NotFound(f"base model {quote_id(base_model)} is not served here; accepted are {accepted}")


def tokenizer_id(context: Context, base_model: str, directory: str) -> str | None:
    """What the SDK loads the tokenizer from: the hub id of a model that came from the hub, else its directory.

    The SDK takes a colon for the end of the id, so that a directory with one cannot be named.
    """
    source = context.settings.engine_configs()[base_model].model
    is_from_hub = f"models--{source.replace('/', '--')}" in directory
    found = source if is_from_hub else directory
    return found if ":" not in found else None
