"""``lorimer key``: make, list and revoke API keys of a data directory, whether or not its server runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.failures import exit_on_error
from lorimer.cli.moments import ago
from lorimer.cli.output import Format, FormatOption, examples, note, print_json, print_table
from lorimer.cli.settings import ConfigOption, DatabaseOption, DataOption, effective_settings
from lorimer.errors import NotFound

if TYPE_CHECKING:
    from lorimer.server.control import Key, KeyCommand, Reply

app = typer.Typer(help="Make, list and revoke API keys of a data directory.", no_args_is_help=True)


@app.command(
    epilog=examples("lorimer key create alice --name laptop", "export LORIMER_API_KEY=$(lorimer key create ci)")
)
def create(
    user: Annotated[str, typer.Argument(help="Whose key it is; what one user makes, others do not see.")],
    name: Annotated[str, typer.Option("--name", help="What the key is for.")] = "",
    remark: Annotated[str, typer.Option("--note", help="Anything worth remembering.")] = "",
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.table,
) -> None:
    """Make a key for USER and print it; it cannot be printed again."""
    with exit_on_error():
        from lorimer.server.control import CreateKey

        made = run(CreateKey(user, name or user, remark), data, database, config).keys[0]
        if output is Format.json:
            print_json(plain(made) | {"secret": made.secret})
        else:
            print(made.secret)
            note(f"key {made.key_id} for {user}; it is not shown again")


@app.command(name="list", epilog=examples("lorimer key list", "lorimer key list -f json --data ./data"))
def list_(
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.table,
) -> None:
    """List all keys; of the secrets, only how they begin."""
    with exit_on_error():
        from lorimer.server.control import ListKeys

        keys = run(ListKeys(), data, database, config).keys
        if output is Format.json:
            print_json([plain(key) for key in keys])
        else:
            columns = ["id", "begins with", "name", "created", "last used", "state", "note"]
            print_table(columns, [row(key) for key in keys])


@app.command(epilog=examples("lorimer key revoke 3"))
def revoke(
    key_id: Annotated[int, typer.Argument(help="The id that `lorimer key list` shows.")],
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.table,
) -> None:
    """End a key: whoever uses it is refused from now on."""
    with exit_on_error():
        from lorimer.server.control import RevokeKey

        if not run(RevokeKey(key_id), data, database, config).revoked:
            raise NotFound(f"there is no valid key {key_id}; `lorimer key list` has them")
        if output is Format.json:
            print_json({"key_id": key_id, "revoked": True})
        else:
            note(f"key {key_id} is revoked")


def run(command: "KeyCommand", data: DataOption, database: DatabaseOption, config: ConfigOption) -> "Reply":
    from lorimer.server.keys import run_key_command

    return run_key_command(effective_settings({"data": data, "database": database}, config, None).settings, command)


def plain(key: "Key") -> dict[str, object]:
    import msgspec

    return {name: value for name, value in msgspec.to_builtins(key).items() if name != "secret"}


def row(key: "Key") -> list[object]:
    used = ago(key.last_used_at) or "never"
    state = "revoked" if key.revoked_at else "valid"
    return [key.key_id, key.prefix, key.name, ago(key.created_at), used, state, key.note]
