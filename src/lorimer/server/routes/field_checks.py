"""Validates fields of requests: text lengths against the settings, ranges of numbers, and supported names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from lorimer.errors import InvalidInput, NotFound, Unsupported
from lorimer.server.data_checks import check_count
from lorimer.server.routes.ownership import is_id, quote_id
from lorimer.server.settings import Settings
from lorimer.types import LoraConfig, OptimizerConfig
from lorimer.types.optim import OPTIMIZERS
from lorimer.types.runs import RunIdentity, UpdateRunRequest

MIN_TTL_SECONDS = 3600
MAX_TTL_SECONDS = 10 * 366 * 86_400
MAX_SEQ_ID = 2**31 - 1
"""The largest number of a training operation; its protobuf field has 32 bits."""


def check_text(settings: Settings, **texts: str | None) -> None:
    """Refuse texts that exceed ``max_string_chars`` or contain NUL, which PostgreSQL cannot store."""
    for field, text in texts.items():
        check_count(f"the length of {field}", len(text or ""), settings.max_string_chars, "max_string_chars")
        if not is_id(text or ""):
            raise InvalidInput(f"{field} holds a NUL character; any other text is accepted")


def check_metadata(settings: Settings, value: object, field: str = "user_metadata") -> None:
    size = len(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    check_count(f"the size of {field} in bytes", size, settings.max_metadata_bytes, "max_metadata_bytes")


def check_run(settings: Settings, run: RunIdentity | UpdateRunRequest | None) -> None:
    """Refuse texts of a run that are too long, and a configuration above ``max_metadata_bytes``."""
    if run is not None:
        check_text(settings, name=run.name, notes=run.notes, tags="".join(run.tags or []))
        check_text(settings, run_key=run.run_key if isinstance(run, RunIdentity) else None)
        check_metadata(settings, run.config, "config")


def text_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return metadata as clients read it back: strings unchanged, any other value as its JSON."""
    if metadata is None:
        return None
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in metadata.items()}


def check_seq_id(seq_id: int | None) -> int:
    if seq_id is None:
        raise InvalidInput("seq_id is missing; operations of a run are numbered 1, 2, 3 in order")
    if not 1 <= seq_id <= MAX_SEQ_ID:
        raise InvalidInput(f"seq_id is {seq_id!r}; 1 to {MAX_SEQ_ID} is accepted")
    return seq_id


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidInput(
            f"ttl_seconds is {ttl_seconds!r}; {MIN_TTL_SECONDS} (an hour) to {MAX_TTL_SECONDS} (ten years) "
            "or null is accepted"
        )
    return ttl_seconds


def check_lora(settings: Settings, config: LoraConfig | None) -> str | None:
    """Return the directory of the adapter that a run begins with, if it is one of the server's."""
    if config is None or config.init_from is None:
        return None
    check_text(settings, init_from=config.init_from)
    root = Path(settings.peft_adapters)
    names = sorted(path.parent.name for path in root.glob("*/adapter_config.json")) if settings.peft_adapters else []
    if config.init_from not in names:
        accepted = ", ".join(map(quote_id, names[:20])) or "none: the server has no adapters (peft_adapters)"
        raise NotFound(f"there is no adapter {quote_id(config.init_from)}; accepted are {accepted}")
    return str((root / config.init_from).absolute())


def check_optimizer(config: OptimizerConfig | None) -> None:
    """Refuse unsupported optimizers and unknown fields. Dimuon is refused because its update rule is not published."""
    if config is None:
        return
    if config.type not in OPTIMIZERS:
        reason = "its update is not published" if config.type == "dimuon" else "it is not known"
        accepted = ", ".join(map(repr, OPTIMIZERS))
        raise Unsupported(f"optimizer {quote_id(config.type)} is not available: {reason}; accepted are {accepted}")
    if unknown := sorted(config.model_extra or {}):
        raise InvalidInput(
            f"optimizer_config has the field {quote_id(unknown[0])}; only 'type' is accepted, and all other fields of"
            " an optimizer are those of a step"
        )
