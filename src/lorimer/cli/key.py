"""``lorimer key``: API keys and quotas of the users of a data directory, whether or not its server runs."""

import math
import re
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import DataOptions, cli_command
from lorimer.cli.moments import ago
from lorimer.cli.output import (
    examples,
    note,
    print_facts,
    print_json,
    print_table,
    size_text,
)
from lorimer.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from lorimer.server.control import Key, KeyCommand, Quotas, Reply

app = typer.Typer(help="Make, list and revoke API keys of a data directory; set quotas of users.", no_args_is_help=True)

StoredBytesOption = Annotated[
    str | None,
    typer.Option(
        "--max-stored-bytes",
        metavar="SIZE",
        help="The user's quota of checkpoints: bytes, or 500MB, 20GB; 0 is no limit, 'default' the server's setting.",
    ),
]
RateOption = Annotated[
    str | None,
    typer.Option(
        "--requests-per-second",
        metavar="RATE",
        help="The user's quota of requests; 0 is no limit, 'default' the server's setting.",
    ),
]
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@app.command(
    epilog=examples(
        "lorimer key create alice --name laptop",
        "lorimer key create bob --max-stored-bytes 20GB --requests-per-second 50",
        "export LORIMER_API_KEY=$(lorimer key create ci)",
    )
)
@cli_command
def create(
    user: Annotated[str, typer.Argument(help="Whose key it is; what one user makes, others do not see.")],
    name: Annotated[str, typer.Option("--name", help="What the key is for.")] = "",
    remark: Annotated[str, typer.Option("--note", help="Anything worth remembering.")] = "",
    max_stored_bytes: StoredBytesOption = None,
    requests_per_second: RateOption = None,
    *,
    options: DataOptions,
) -> None:
    """Make a key for USER and print it; it cannot be printed again.

    Quotas belong to the user: they hold for all of their keys together, those made before too.
    """
    from lorimer.server.control import CreateKey

    quotas = read_quotas(max_stored_bytes, requests_per_second)
    made = run(CreateKey(user, name or user, remark, quotas), options).keys[0]
    if options.is_json:
        print_json(plain(made) | {"secret": made.secret})
    else:
        print(made.secret)
        note(f"key {made.key_id} for {user}; it is not shown again")


@app.command(name="list", epilog=examples("lorimer key list", "lorimer key list -f json --data ./data"))
@cli_command
def list_(
    *,
    options: DataOptions,
) -> None:
    """List all keys; of the secrets, only how they begin.

    `stored` is what the checkpoints of the key's user take up, of what their quota allows; `rate` their requests per
    second.
    """
    from lorimer.server.control import ListKeys

    keys = run(ListKeys(), options).keys
    if options.is_json:
        print_json([plain(key) for key in keys])
    else:
        columns = ["id", "user", "begins with", "name", "created", "last used", "state", "stored", "rate", "note"]
        print_table(columns, [row(key) for key in keys])


@app.command(
    epilog=examples(
        "lorimer key quota alice --max-stored-bytes 50GB", "lorimer key quota alice --requests-per-second 0"
    )
)
@cli_command
def quota(
    user: Annotated[str, typer.Argument(help="Whose quotas; they hold for all keys of the user together.")],
    max_stored_bytes: StoredBytesOption = None,
    requests_per_second: RateOption = None,
    *,
    options: DataOptions,
) -> None:
    """Show the quotas of USER, or change them; a running server follows within seconds."""
    from lorimer.server.control import SetQuotas

    quotas = read_quotas(max_stored_bytes, requests_per_second)
    keys = run(SetQuotas(user, quotas), options).keys
    if not keys:
        raise NotFound(f"user {user!r} has no key; `lorimer key create` makes one, with quotas")
    shown = keys[0]
    if options.is_json:
        names = ("user", "stored_bytes", "max_stored_bytes", "requests_per_second")
        print_json({name: value for name, value in plain(shown).items() if name in names})
    else:
        print_facts({"user": shown.user, "stored": stored_text(shown), "requests": rate_text(shown)})


@app.command(epilog=examples("lorimer key revoke 3"))
@cli_command
def revoke(
    key_id: Annotated[int, typer.Argument(help="The id that `lorimer key list` shows.")],
    *,
    options: DataOptions,
) -> None:
    """End a key: whoever uses it is refused from now on."""
    from lorimer.server.control import RevokeKey

    if not run(RevokeKey(key_id), options).revoked:
        raise NotFound(f"there is no valid key {key_id}; `lorimer key list` has them")
    if options.is_json:
        print_json({"key_id": key_id, "revoked": True})
    else:
        note(f"key {key_id} is revoked")


def run(command: "KeyCommand", options: DataOptions) -> "Reply":
    from lorimer.server.keys import run_key_command

    return run_key_command(options.settings(), command)


def plain(key: "Key") -> dict[str, object]:
    import msgspec

    return {name: value for name, value in msgspec.to_builtins(key).items() if name != "secret"}


def row(key: "Key") -> list[object]:
    used = ago(key.last_used_at) or "never"
    state = "revoked" if key.revoked_at else "valid"
    quotas = [stored_text(key), rate_text(key)]
    return [key.key_id, key.user, key.prefix, key.name, ago(key.created_at), used, state, *quotas, key.note]


def stored_text(key: "Key") -> str:
    limit = f" of {size_text(key.max_stored_bytes)}" if key.max_stored_bytes else ""
    return size_text(key.stored_bytes) + limit


def rate_text(key: "Key") -> str:
    return f"{key.requests_per_second:g}/s" if key.requests_per_second else "no limit"


def read_quotas(max_stored_bytes: str | None, requests_per_second: str | None) -> "Quotas":
    """What the options say; those not given stay unset."""
    from msgspec import UNSET

    from lorimer.server.control import Quotas

    return Quotas(
        UNSET if max_stored_bytes is None else read_size(max_stored_bytes),
        UNSET if requests_per_second is None else read_rate(requests_per_second),
    )


def read_size(text: str) -> int | None:
    """The bytes that ``20GB`` or a number says; None for ``default``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)", text.strip().upper())
    if text == "default":
        return None
    size = float(found[1]) * UNITS.get(found[2], math.nan) if found else math.nan
    if not size < 2**63:  # nan too
        raise InvalidInput(f"--max-stored-bytes is {text!r}; bytes, a size such as 20GB, 0 or 'default' is accepted")
    return int(size)


def read_rate(text: str) -> float | None:
    """The number; None for ``default``."""
    if text == "default":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise InvalidInput(f"--requests-per-second is {text!r}; a number from 0 or 'default' is accepted")
    return rate
