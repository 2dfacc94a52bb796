"""The schema: what the revisions build is what the tables say, on both databases, whatever happens on the way."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from lorimer.errors import StorageError
from lorimer.store import Store, migrations
from lorimer.store.connections import database_url, writer_engine
from lorimer.store.tables import SCHEMA_VERSION, metadata


@pytest.fixture
def connection(new_database, tmp_path):
    """To a database that is still empty."""
    engine = writer_engine(database_url(new_database, tmp_path), "process", {})
    with engine.connect() as connection:
        yield connection


def tables(connection):
    found = set(inspect(connection).get_table_names())
    connection.rollback()
    return found


def test_the_migrated_schema_is_that_of_the_tables(connection):
    migrations.migrate(connection)
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    assert compare_metadata(context, metadata) == []
    assert tables(connection) == {"alembic_version", *metadata.tables}


def test_the_comparison_sees_a_difference(connection):
    migrations.migrate(connection)
    with connection.begin():
        connection.execute(text("DROP INDEX ix_futures_queued"))
        connection.execute(text("ALTER TABLE users ADD COLUMN extra TEXT"))
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    assert {difference[0] for difference in compare_metadata(context, metadata)} == {"add_index", "remove_column"}


def test_partial_indices_have_their_conditions(connection):
    migrations.migrate(connection)
    name = connection.dialect.name
    found = {index["name"]: index for index in inspect(connection).get_indexes("futures")}
    partial = ("queued", "lane_holds_bytes", "fetched_holds_bytes", "errors")
    for index in (f"ix_futures_{part}" for part in partial):
        assert f"{name}_where" in found[index]["dialect_options"]


def test_the_version_is_the_newest_revision():
    config = Config()
    config.set_main_option("script_location", migrations.__path__[0])
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_VERSION]


def test_migrating_again_changes_nothing(connection):
    migrations.migrate(connection)
    with connection.begin():
        connection.execute(text("INSERT INTO users VALUES ('1', 'ada', '', '2026-01-01 00:00:00', NULL, NULL)"))
    migrations.migrate(connection)
    assert connection.scalar(text("SELECT count(*) FROM users")) == 1


def test_a_migration_that_dies_half_way_leaves_the_old_schema(connection, monkeypatch):
    """The revision has made tables when it is stopped."""
    from alembic import op

    make, made = op.create_table, []

    def make_some(name, *arguments, **options):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(name)
        return make(name, *arguments, **options)

    monkeypatch.setattr(op, "create_table", make_some)
    with pytest.raises(KeyboardInterrupt):
        migrations.migrate(connection)
    assert len(made) == 5
    assert tables(connection) == set()
    monkeypatch.undo()
    migrations.migrate(connection)
    assert "futures" in tables(connection)


def test_the_schema_of_a_development_version_is_refused(new_database, tmp_path):
    store = Store.open(new_database, tmp_path / "data")
    store.write_now(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '0004'")))
    store.close()
    with pytest.raises(StorageError, match=r"the schema '0004' of a development version, .* begins with schema '0005'"):
        Store.open(new_database, tmp_path / "data")


def test_the_schema_of_a_newer_version_is_refused(new_database, tmp_path):
    store = Store.open(new_database, tmp_path / "data")
    store.write_now(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    store.close()
    with pytest.raises(StorageError, match="the schema '9999' of a newer Lorimer, this one knows schemas up to '0006'"):
        Store.open(new_database, tmp_path / "data")
