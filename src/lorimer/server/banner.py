"""The startup output of ``lorimer serve``: the URL, who may use it, loading progress of the models, and an example."""

import asyncio

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from lorimer import __version__
from lorimer.errors import InvalidInput, LorimerError, ModelRefused
from lorimer.scheduler.stats import ServedModel
from lorimer.server.context import Context

REFRESH_SECONDS = 0.2

EXAMPLE = """\
export TINKER_BASE_URL={url} TINKER_API_KEY={key}
python -c "import tinker; s = tinker.ServiceClient(); print(s.get_server_capabilities())"
lorimer key create NAME --data {data}    # {keys}"""


class Banner:
    """Prints the startup output. ``serve`` calls it once the server listens."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def __call__(self, context: Context, url: str) -> None:
        is_open = context.credentials.is_open
        mode = "open: no key needed, only this machine can connect" if is_open else "with keys"
        self._print(f"[bold]Lorimer {__version__}[/] at [bold]{url}[/] ({mode})")
        self._print("open that address in a browser for runs, curves and a playground")
        self._print(f"data in {escape(str(context.directory.path))}")
        starting = [model for model in context.scheduler.served_models() if context.settings.starts_eagerly]
        for model in context.scheduler.served_models():
            if model not in starting:
                self._print(f"model {escape(model.name)}: loaded on first use")
        await self._load(context, [model.name for model in starting])
        example = EXAMPLE.format(
            url=url,
            key="tml-local" if is_open else "tml-...",
            data=context.directory.path,
            keys="the first key ends open mode" if is_open else "one more key",
        )
        self._console.print(example, markup=False, highlight=False, soft_wrap=True)

    async def _load(self, context: Context, names: list[str]) -> None:
        """Wait for the models to load; show progress bars on a terminal, lines otherwise."""
        if not self._console.is_terminal:
            for name in names:
                self._print(f"model {escape(name)}: loading")
        waiting = {name: asyncio.ensure_future(context.scheduler.model_info(name)) for name in names}
        try:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[stage]}"),
            )
            with Progress(
                *columns, console=self._console, transient=True, disable=not self._console.is_terminal
            ) as bars:
                tasks = {name: bars.add_task(escape(name), total=None, stage="") for name in names}
                pending = set(waiting.values())
                while pending:
                    _, pending = await asyncio.wait(
                        pending, timeout=REFRESH_SECONDS if self._console.is_terminal else None
                    )
                    for model in context.scheduler.served_models():
                        if model.name in tasks:
                            bars.update(tasks[model.name], stage=escape(model.stage))
        finally:
            for future in waiting.values():  # on shutdown nobody else waits for these futures
                future.cancel()
        for name, future in waiting.items():
            error = future.exception()
            if isinstance(error, InvalidInput):
                raise ModelRefused(f"model {name!r} cannot be served: {error}") from error
            if error is not None and not isinstance(error, LorimerError):
                raise error
            ended = {model.name: model for model in context.scheduler.served_models()}[name]
            self._print(f"model {escape(name)}: {escape(str(error)) if error else ready_text(ended)}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def ready_text(model: ServedModel) -> str:
    return f"ready ({model.info.max_context} tokens of context)" if model.info else "ready"
