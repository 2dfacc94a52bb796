"""A server is opened whole or not at all, looks after itself while it runs, and leaves nothing behind."""

import asyncio
import threading
from dataclasses import replace

import pytest
from sqlalchemy import Engine, event

from lorimer.errors import InUse, Unsupported
from lorimer.server.app import make_scheduler, running
from lorimer.server.settings import Settings
from lorimer.server.upkeep import Periodic
from lorimer.store import sessions


def settings(tmp_path, **values):
    return Settings(data=tmp_path / "data", start_engines="lazy", **values)


async def test_where_ray_places_workers_full_runs_are_refused_by_name(tmp_path):
    chosen = settings(tmp_path, role="api", cluster="ray", database="postgresql://nobody@127.0.0.1:1/none")
    async with running(settings(tmp_path)) as context:
        given = context.store, context.directory, b"secret", context.credentials, context.scheduler.scratch
        refusing = make_scheduler(chosen, *given)
        assert refusing.limits.max_full_runs == 0
        with pytest.raises(Unsupported, match="not offered where Ray places workers"):
            refusing.full_replicas(next(iter(refusing.models)))


async def test_second_server_on_the_data_directory_is_refused(tmp_path):
    async with running(settings(tmp_path)):
        with pytest.raises(InUse, match="in use by process"):
            async with running(settings(tmp_path)):
                pass
    async with running(settings(tmp_path)):
        pass


async def test_nothing_is_left_after_the_end(tmp_path):
    before = {thread.name for thread in threading.enumerate()}
    async with running(settings(tmp_path)):
        assert (tmp_path / "data" / "control").is_socket()
    assert not (tmp_path / "data" / "control").exists()
    assert {
        name for name in {thread.name for thread in threading.enumerate()} - before if "asyncio" not in name
    } == set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_failed_start_releases_the_directory(tmp_path):
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "control").mkdir()
    with pytest.raises(OSError, match="control"):
        async with running(settings(tmp_path)):
            pass
    (tmp_path / "data" / "control").rmdir()
    async with running(settings(tmp_path)):
        pass


async def test_heartbeats_are_written_together(tmp_path):
    """One statement writes what twenty sessions sent between two flushes, each many times."""
    updates = []

    def record(connection, cursor, statement, parameters, *_):
        if statement.startswith("UPDATE sessions"):
            updates.append(len(parameters))

    event.listen(Engine, "before_cursor_execute", record)
    try:
        async with running(settings(tmp_path, heartbeat_flush_seconds=0.5)) as context:
            made = [await new_session(context) for _ in range(20)]
            for _ in range(3):
                for session in made:
                    context.heartbeat(session)
            context.heartbeat(replace(made[0], session_id="unknown"))
            async with asyncio.timeout(30):
                while not updates:
                    await asyncio.sleep(0.01)
            await context.store.write(lambda connection: None)  # behind the flush
            found = [await context.store.read(sessions.get_session, session.session_id) for session in made]
    finally:
        event.remove(Engine, "before_cursor_execute", record)
    assert updates == [21]
    assert all(now.last_seen_at > before.last_seen_at for now, before in zip(found, made, strict=True))


async def test_heartbeats_are_written_at_the_end(tmp_path):
    async with running(settings(tmp_path)) as context:
        made = await new_session(context)
        context.heartbeat(made)
    async with running(settings(tmp_path)) as context:
        found = await context.store.read(sessions.get_session, made.session_id)
        assert found.last_seen_at > made.last_seen_at


async def new_session(context):
    user = (await context.credentials.identify("")).user
    values = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "project_id": None, "display_name": None}
    return await context.store.write(sessions.create_session, user_id=user.user_id, **values)


async def test_periodic_job_goes_on_after_an_error_and_stops(caplog):
    runs = []
    enough = asyncio.Event()

    async def job():
        runs.append(1)
        if len(runs) >= 3:
            enough.set()
        raise ValueError("no")

    periodic = Periodic(0.01, job, "sweep")
    periodic.start()
    async with asyncio.timeout(5):
        await enough.wait()
    await periodic.stop()
    count = len(runs)
    await asyncio.sleep(0.05)
    assert len(runs) == count
    assert "sweep failed" in caplog.text
