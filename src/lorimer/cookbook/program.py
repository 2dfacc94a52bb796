"""A recipe's server, with the address of its console, at which its runs can be watched, printed at start and end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from lorimer import ServiceClient
from lorimer.client.connection import named_base_url
from lorimer.client.embedded import running_server
from lorimer.cookbook.progress import say
from lorimer.cookbook.service import open_service
from lorimer.errors import InvalidInput
from lorimer.terminal import command

DEFAULT_MODEL = "lorimer/tiny"


@contextmanager
def recipe_service(base_model: str, base_url: str | None = None, *, name: str | None = None) -> Iterator[ServiceClient]:
    """``open_service`` for a program at a terminal: connects now, and says where runs can be watched.

    Its session is called ``name``, else after the program. Without an address it connects to the server that runs on
    the user's data directory, if one does.
    """
    try:
        if named_base_url(base_url) is None and (base_url := running_server()):
            say(f"using the server at {base_url}, which has your data directory")
        opened = open_service(base_model, base_url, display_name=name or program_name())
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    with opened as service:
        is_local = service.create_rest_client().holder.is_local
        if is_local:
            say(f"starting a server in this process, which loads {base_model}; it has no console of its own")
        connection = service.holder.connection
        if not is_local:
            say(f"console: {connection.console_url('runs')}")
        yield service
    if is_local:
        model = [] if base_model == DEFAULT_MODEL else ["--model", base_model]
        say(f"console: `{command('serve', *model)}` shows this run")
    else:
        say(f"console: {connection.console_url('runs')}")


def program_name() -> str:
    """Return what the user has started, such as ``lorimer recipe run dpo`` or ``dpo``, as a name for its session."""
    path, words = Path(sys.argv[0]), sys.argv[1:4]
    if path.stem != "lorimer" and path.parent.name != "cli":
        return path.stem
    return " ".join(["lorimer", *takewhile(lambda word: not word.startswith("-"), words)])
