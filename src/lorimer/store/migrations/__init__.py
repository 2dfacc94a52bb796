"""The history of the schema, as Alembic revisions, and the function that brings a database up to it.

All pending revisions run in one transaction under a lock, so a database has the old schema or the new one, whatever
happens on the way. A schema of a newer Lorimer is refused, and so is one from before the first release.
"""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from lorimer.errors import StorageError
from lorimer.store.tables import SCHEMA_VERSION

_MIGRATION_LOCK = 0x4C6F726D696772


def migrate(connection: Connection) -> None:
    """Bring the database to `SCHEMA_VERSION`. The connection has no open transaction, before or after."""
    # PostgreSQL's DDL is transactional; so is SQLite's, if the transaction is begun by hand, as the writer's are.
    with connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        current = current_revision(connection)
        if current == SCHEMA_VERSION:
            return
        _upgrade(connection, current)


def current_revision(connection: Connection) -> str | None:
    """Return the revision of the database; None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _upgrade(connection: Connection, current: str | None) -> None:
    # Alembic is not needed in a start without migrations, and takes its time to load.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if current is not None and current not in known and current < SCHEMA_VERSION:
        raise StorageError(
            f"the database has the schema {current!r} of a development version, which this Lorimer does not migrate: it"
            f" begins with schema {min(known)!r}; start with another data directory or database"
        )
    if current is not None and current not in known:
        raise StorageError(
            f"the database has the schema {current!r} of a newer Lorimer, this one knows schemas up to"
            f" {SCHEMA_VERSION!r}; start the newer version or another database"
        )
    command.upgrade(config, "head")
