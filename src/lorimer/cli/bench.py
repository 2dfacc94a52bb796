"""``lorimer bench``: how fast one's own machine trains and samples one's own model, through the SDK."""

import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import cli_command
from lorimer.cli.connection import KeyOption, UrlOption, find_server, named_server
from lorimer.cli.output import Format, FormatOption, examples, print_facts, print_json, size_text
from lorimer.cli.progress import Report, progress_bar
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer import ServiceClient

EPILOG = examples(
    "lorimer bench",
    "lorimer bench --model smollm2-135m-instruct --seconds 120",
    "lorimer bench --base-url http://127.0.0.1:8000 --model Qwen/Qwen3-0.6B -f json",
)

DEFAULT_MODEL = "lorimer/tiny"
SEQUENCE_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Measured:
    model: str
    server: str
    """Its address, or ``local`` for the service in this process."""
    machine: str
    rank: int
    sequence_tokens: int
    start_seconds: float
    """From nothing to the first operation done."""
    train_tokens_per_second: float
    sample_1x16_tokens_per_second: float
    sample_8x1_tokens_per_second: float
    request_ms: float
    operation_ms: float
    operation_p90_ms: float
    engine_bytes: int | None
    """Memory of the engine, where it runs below this process."""
    service_bytes: int | None


@cli_command
def bench(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Base model: as for `lorimer serve`, or a name it serves.")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the LoRA that is trained.")] = 16,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long to measure, about.")] = 45,
    output: FormatOption = Format.table,
    base_url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Measure training, sampling and latency on this machine or a server, in about a minute.

    Without a server the service runs in this process, on a data directory that is removed afterwards.
    """
    with progress_bar() as report:
        found = run(model, rank, seconds, base_url, api_key, report)
    if output is Format.json:
        print_json(asdict(found))
    else:
        print_facts(facts_of(found))


def run(
    model: str | None, rank: int, seconds: float, base_url: str | None, api_key: str | None, report: Report
) -> Measured:
    report("starting", None)
    from lorimer.cli.measuring import Bench, median_ms, slow_ms

    with open_service(model, base_url, api_key) as (service, name, address):
        begun = time.monotonic()
        measured = Bench(service, name, rank, sequence_tokens(service, name))
        measured.operation_seconds()
        start_seconds = time.monotonic() - begun
        report("measuring latency", 0.05)
        requests, operations = measured.request_seconds(), measured.operation_seconds()
        report("measuring training", 0.1)
        train = measured.train(0.4 * seconds)
        report("measuring 16 samples of one prompt", 0.5)
        sampler = measured.sampler()
        one = measured.sample(sampler, 1, 16, 0.3 * seconds)
        report("measuring samples of 8 prompts", 0.8)
        eight = measured.sample(sampler, 8, 1, 0.3 * seconds)
        engine, own = memory_bytes() if address == "local" else (None, None)
        return Measured(
            model=name,
            server=address,
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            rank=rank,
            sequence_tokens=measured.sequence_tokens,
            start_seconds=start_seconds,
            train_tokens_per_second=train,
            sample_1x16_tokens_per_second=one,
            sample_8x1_tokens_per_second=eight,
            request_ms=median_ms(requests),
            operation_ms=median_ms(operations),
            operation_p90_ms=slow_ms(operations),
            engine_bytes=engine,
            service_bytes=own,
        )


@contextmanager
def open_service(
    model: str | None, base_url: str | None, api_key: str | None
) -> "Iterator[tuple[ServiceClient, str, str]]":
    """A client, the name of the model and where it is served: by a named server, or in this process."""
    from lorimer import ServiceClient

    named = named_server(base_url, None)
    if named and named != "local":
        url = find_server(base_url, None)
        with ServiceClient(base_url=url, api_key=api_key, display_name="lorimer bench") as service:
            yield service, served_name(service, model), url
        return
    from lorimer.client import embedded

    with tempfile.TemporaryDirectory(prefix="lorimer-bench-") as temporary:
        os.environ["LORIMER_DATA"] = str(Path(temporary) / "data")
        try:
            with ServiceClient(base_url="local", model=model or DEFAULT_MODEL) as service:
                yield service, served_name(service, None), "local"
        finally:
            embedded.service().stop()


def served_name(service: "ServiceClient", wanted: str | None) -> str:
    names = [model.model_name for model in service.get_server_capabilities().supported_models if model.model_name]
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise InvalidInput(f"the server does not serve {wanted!r}; it serves {', '.join(map(repr, names))}")
    return wanted


def sequence_tokens(service: "ServiceClient", name: str) -> int:
    models = service.get_server_capabilities().supported_models
    longest = next((model.max_context_length for model in models if model.model_name == name), None)
    return min(SEQUENCE_TOKENS, (longest or SEQUENCE_TOKENS) // 2)


def memory_bytes() -> tuple[int, int]:
    """Of the engines that this process has started, and of the process itself."""
    import psutil

    process = psutil.Process()
    children = process.children(recursive=True)
    return sum(child.memory_info().rss for child in children), process.memory_info().rss


def facts_of(found: Measured) -> dict[str, object]:
    from lorimer.cli.measuring import PROMPT_TOKENS, SAMPLE_TOKENS, SEQUENCES

    shape = f"prompts of {PROMPT_TOKENS} tokens, {SAMPLE_TOKENS} new ones"
    return {
        "model": f"{found.model}, LoRA rank {found.rank}",
        "server": found.server,
        "machine": found.machine,
        "started in": f"{found.start_seconds:.1f} s",
        "training": f"{found.train_tokens_per_second:,.0f} tokens/s (steps of {SEQUENCES} x {found.sequence_tokens})",
        "sampling 1 x 16": f"{found.sample_1x16_tokens_per_second:,.0f} tokens/s ({shape})",
        "sampling 8 x 1": f"{found.sample_8x1_tokens_per_second:,.0f} tokens/s",
        "latency": f"{found.request_ms:.1f} ms a request, {found.operation_ms:.1f} ms the smallest operation"
        f" (nine of ten below {found.operation_p90_ms:.1f} ms)",
        "memory": None
        if found.engine_bytes is None
        else f"{size_text(found.engine_bytes)} engine, {size_text(found.service_bytes)} service and this program",
    }
