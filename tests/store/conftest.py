"""Every store test runs on SQLite and on PostgreSQL; the latter is skipped where the server is not installed."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorimer.store import Store
from lorimer.store.runs import Run, create_run
from lorimer.store.sessions import Session, create_session
from lorimer.store.tables import metadata
from lorimer.store.users import User, ensure_user
from tests.store.postgres import PostgresServer, running


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running() as server:
        yield server


@pytest.fixture
def postgres_url(postgres) -> Iterator[str]:
    """An empty database of its own."""
    name = f"test_{secrets.token_hex(6)}"
    postgres.execute(f"CREATE DATABASE {name}")
    yield postgres.url(name)
    postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def shared_postgres_url(postgres) -> str:
    postgres.execute("CREATE DATABASE shared")
    return postgres.url("shared")


@pytest.fixture
def emptied_postgres_url(postgres, shared_postgres_url) -> Iterator[str]:
    """A migrated database, empty again after the test: much faster to have than a new one."""
    yield shared_postgres_url
    postgres.execute(f"TRUNCATE {', '.join(metadata.tables)}", "shared")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request) -> str | None:
    """The URL `Store.open` is given."""
    return None if request.param == "sqlite" else request.getfixturevalue("emptied_postgres_url")


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request) -> str | None:
    """The same for a database without tables."""
    return None if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory) -> Path:
    """An SQLite database with all tables and nothing in them: to copy it is much faster than to migrate one."""
    data = tmp_path_factory.mktemp("migrated") / "data"
    Store.open(None, data).close()
    return data / "lorimer.db"


@pytest.fixture
def store(database, tmp_path, request) -> Iterator[Store]:
    if database is None:
        (tmp_path / "data").mkdir(mode=0o700)
        shutil.copy2(request.getfixturevalue("migrated_file"), tmp_path / "data")
    opened = Store.open(database, tmp_path / "data", retry_seconds=20)
    yield opened
    opened.close()


@pytest.fixture
def user(store) -> User:
    return store.write_now(ensure_user, "ada")


@pytest.fixture
def session(store, user) -> Session:
    return store.write_now(create_session, user_id=user.user_id)


@pytest.fixture
def run(store, session) -> Run:
    return store.write_now(
        create_run,
        session_id=session.session_id,
        user_id=session.user_id,
        project_id=None,
        model_seq_id=0,
        base_model="lorimer/tiny",
        rank=8,
        seed=1,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        optimizer_type="adamw",
        user_metadata={},
    )
