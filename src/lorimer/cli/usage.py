"""``lorimer usage``: the tokens that were trained and sampled, and what checkpoints take up."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.moments import parse_moment
from lorimer.cli.output import Column, print_json, print_table, size_text
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.client.rest import RestClient
    from lorimer.types import BillingUsageEvent

HOUR = timedelta(hours=1)
MAX_PERIOD = timedelta(days=14)
"""Servers refuse a longer period in one request."""
COUNTS = {
    "trained": "trained_tokens",
    "prompt": "prompt_tokens",
    "cached": "cached_prompt_tokens",
    "sampled": "sampled_tokens",
    "saved": "checkpoints",
}
"""What is counted: the title of its column, and its name in JSON."""


class By(StrEnum):
    model = "model"
    session = "session"
    project = "project"
    user = "user"
    day = "day"
    hour = "hour"


@cli_command
def usage(
    since: Annotated[str, typer.Option("--from", metavar="TIME", help="A date, a time, or 7d for a week ago.")] = "7d",
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="The end; now is the default.")] = None,
    by: Annotated[
        By, typer.Option("--by", help="What a row is: a model, session, project, user, day or hour.")
    ] = By.model,
    *,
    options: ServerOptions,
) -> None:
    """Show the tokens trained and sampled, by model, session or day, and the size of all checkpoints.

    Training counts the tokens of every datum, also of prefixes that datums share and the engine computes once. Prompt
    tokens that were found in the cache are counted apart. Hours are counted whole.
    """
    start, end = hours(since, until)
    client = options.rest_client()
    rows = grouped(events(client, start, end), by)
    answer = client.get_current_checkpoint_storage_usage().result()
    stored, quotas = answer.data, answer.quotas
    num_checkpoints, num_bytes = (sum(item.checkpoint_count for item in stored), sum(i.size_bytes for i in stored))
    if options.is_json:
        print_json(
            {
                "from": start.isoformat(),
                "to": end.isoformat(),
                "by": by.value,
                "usage": [{by.value: name} | counts for name, counts in rows.items()],
                "storage": {"checkpoint_count": num_checkpoints, "size_bytes": num_bytes},
                "quotas": quotas.model_dump() if quotas else None,
            }
        )
        return
    print_usage(rows, by)
    limit = f" of the {size_text(quotas.max_stored_bytes)} allowed" if quotas and quotas.max_stored_bytes else ""
    print(f"\n{num_checkpoints} checkpoints are kept, {size_text(num_bytes)}{limit}")
    if quotas and quotas.requests_per_second:
        print(f"{quotas.requests_per_second:g} requests per second are allowed")


def hours(since: str, until: str | None) -> tuple[datetime, datetime]:
    """The full hours that hold the time asked for."""
    start = parse_moment(since).astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    last = parse_moment(until).astimezone(UTC) if until else datetime.now(UTC)
    end = last.replace(minute=0, second=0, microsecond=0)
    end += HOUR if end < last else timedelta()
    if start >= end:
        raise InvalidInput(f"--from {since!r} is not before --to {until or 'now'!r}")
    return start, end


def events(client: "RestClient", start: datetime, end: datetime) -> Iterator["BillingUsageEvent"]:
    while start < end:
        until = min(start + MAX_PERIOD, end)
        yield from client.get_billing_usage(start, until).result().data
        start = until


def grouped(found: Iterator["BillingUsageEvent"], by: By) -> dict[str, dict[str, int]]:
    """The sum of every count for each name, in the order of the names."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS.values(), 0))
    for event in found:
        if (counted := count(event)) is not None:
            rows[name_of(event, by)][counted[0]] += counted[1]
    return dict(sorted(rows.items()))


def count(event: "BillingUsageEvent") -> tuple[str, int] | None:
    info = event.event_info
    if info.type == "training":
        return "trained_tokens", info.token_count
    if info.type == "sampling_prefill":
        return "cached_prompt_tokens" if info.cached else "prompt_tokens", info.token_count
    if info.type == "sampling_sample":
        return "sampled_tokens", info.token_count
    return ("checkpoints", info.count) if info.type == "checkpoint" else None


def name_of(event: "BillingUsageEvent", by: By) -> str:
    match by:
        case By.model:
            return event.base_model or ""
        case By.session:
            return event.session_id or ""
        case By.project:
            return event.project_id or ""
        case By.user:
            return event.user_name or event.user_id or ""
        case By.day:
            return f"{event.bucket_start.astimezone(UTC):%Y-%m-%d}"
        case By.hour:
            return f"{event.bucket_start.astimezone(UTC):%Y-%m-%dT%H:%MZ}"


def print_usage(rows: dict[str, dict[str, int]], by: By) -> None:
    sums = {name: sum(counts[name] for counts in rows.values()) for name in COUNTS.values()}
    lines = [*rows.items(), *([("total", sums)] if len(rows) != 1 else [])]
    columns = [Column(by.value, whole=True), *(Column(title, justify="right") for title in COUNTS)]
    print_table(columns, [[name or "-", *(f"{counts[key]:,}" for key in COUNTS.values())] for name, counts in lines])
