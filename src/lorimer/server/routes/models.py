"""Looks up base models by the names that clients use."""

from lorimer.errors import NotFound
from lorimer.server.context import Context
from lorimer.server.routes.ownership import quote_id


def check_served(context: Context, base_model: str) -> None:
    names = [model.name for model in context.scheduler.served_models()]
    if base_model not in names:
        accepted = ", ".join(map(repr, names))
        raise NotFound(f"base model {quote_id(base_model)} is not served here; accepted are {accepted}")


def tokenizer_id(context: Context, base_model: str, directory: str) -> str | None:
    """Return what the SDK loads the tokenizer from: the hub id of a model from the hub, else its directory.

    The SDK treats a colon as the end of the id, so a directory with a colon cannot be given.
    """
    source = context.settings.engine_configs()[base_model].model
    is_from_hub = f"models--{source.replace('/', '--')}" in directory
    found = source if is_from_hub else directory
    return found if ":" not in found else None
