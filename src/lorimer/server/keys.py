"""``lorimer key`` without HTTP: asks the server running on the data directory, or opens the database itself."""

import asyncio
from contextlib import ExitStack

from lorimer.server.control import KeyCommand, Reply, ask_server, run_command
from lorimer.server.credentials import Credentials
from lorimer.server.roles import open_store
from lorimer.server.settings import Settings
from lorimer.server.signing import Signer
from lorimer.store.directory import DataDirectory


def run_key_command(settings: Settings, command: KeyCommand) -> Reply:
    """Run a key command. Raise ``InUse`` if a server holds the directory but does not listen on its control socket."""
    directory = settings.data.expanduser().absolute()
    return ask_server(directory, command) or asyncio.run(_run_alone(settings, command))


async def _run_alone(settings: Settings, command: KeyCommand) -> Reply:
    # Keys of a PostgreSQL database are changed beside its API replicas and workers, also in a container of one of them:
    # the database is shared, and the data directory, which that process may hold alone, is not touched.
    is_shared = settings.database.startswith("postgresql")
    with ExitStack() as stack:
        directory = DataDirectory(settings.data)
        if not is_shared:
            directory.lock()
            stack.callback(directory.unlock)
        store = open_store(settings, directory, is_shared=is_shared)
        stack.callback(store.close)
        credentials = Credentials(store, Signer(directory.secret), allow_open=False)
        return await run_command(credentials, settings, command)
