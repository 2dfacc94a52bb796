"""Every row of every table comes out of a backup as it was, from SQLite through PostgreSQL and back."""

from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from sqlalchemy import BigInteger, Boolean, Double, Integer, LargeBinary, delete, insert, select, text

from lorimer.errors import StorageError
from lorimer.store.columns import Json, UtcDateTime
from lorimer.store.connections import database_url
from lorimer.store.database import Store
from lorimer.store.tables import api_keys, metadata
from lorimer.store.transfer import copy_database, import_database


def quiet(text, fraction):
    pass


def drawn(column, random: Random, number: int):
    """A value that the column can hold, often one at an end of its range."""
    if column.nullable and random.random() < 0.3:
        return None
    match column.type:
        case UtcDateTime():
            return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=random.randrange(2**52))
        case Json():
            return {"ключ": [random.random(), None, "\u2028 'a'"]} if random.random() < 0.5 else []
        case Boolean():
            return random.random() < 0.5
        case LargeBinary():
            return random.randbytes(random.choice((0, 1, 70_000)))
        case Double():
            return random.choice((0.1, -0.0, 1e308, 5e-324, random.random()))
        case BigInteger():
            return random.choice((0, 2**63 - 1 - number, -(2**63) + number, number))
        case Integer():
            return number
        case _:
            return f"{column.name} {number} é\u0001\U0001f600{random.random()}"


def fill(connection) -> None:
    random = Random(0)
    for table in metadata.sorted_tables:
        rows, counted = [], table.autoincrement_column
        for number in range(1, 6):
            row = {column.name: drawn(column, random, number) for column in table.c}
            for column in table.c:
                for key in column.foreign_keys:
                    known = connection.scalars(select(key.column).order_by(key.column)).all()
                    row[column.name] = known[number % len(known)]
            if counted is not None:
                row[counted.name] = 10 * number
            rows.append(row)
        connection.execute(insert(table), rows)
        if (
            counted is not None and connection.dialect.name == "postgresql"
        ):  # which does not see numbers it did not give
            connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table.name}', '{counted.name}'), 50)"))
    connection.execute(delete(api_keys).where(api_keys.c.key_id == 50))  # the number must not be given again


def contents(connection) -> dict[str, list[tuple]]:
    return {
        table.name: sorted(map(tuple, connection.execute(select(table))), key=repr) for table in metadata.sorted_tables
    }


@pytest.fixture
def filled(store):
    store.write_now(fill)
    return store


def test_rows_come_back_through_either_database(filled, database, postgres_url, tmp_path):
    expected = filled.read_now(contents)
    assert all(expected.values())
    url = database_url(database, tmp_path / "data")
    rows = copy_database(url, tmp_path / "first.db", quiet)
    assert rows == {name: len(found) for name, found in expected.items()}
    other = database_url(postgres_url, tmp_path)
    filled.close()
    import_database(tmp_path / "first.db", other, quiet, replace=True)
    copy_database(other, tmp_path / "second.db", quiet)
    for where in (postgres_url, f"sqlite:///{tmp_path / 'second.db'}"):
        store = Store.open(where, tmp_path / "other")
        try:
            assert store.read_now(contents) == expected
            assert store.write_now(next_key) > 50
        finally:
            store.close()
    with pytest.raises(StorageError, match="is not empty; --replace"):
        import_database(tmp_path / "first.db", other, quiet, replace=False)


def next_key(connection) -> int:
    """The number that a new key gets; numbers were given up to 50, which is gone."""
    row = connection.execute(select(api_keys)).mappings().first()
    values = {name: value for name, value in row.items() if name != "key_id"}
    return connection.execute(insert(api_keys).values(values)).inserted_primary_key[0]
