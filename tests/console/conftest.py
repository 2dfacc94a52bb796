"""Real servers, a real browser, and pages that are watched: an error in the console, a breach of the policy or a
request to another host fails a test, whatever it tests.

Playwright's plain interface keeps an event loop in the thread that uses it, so the browser ends with each file, before
tests of other folders need a loop of their own, and the SDK is called from another thread (`Trainer`).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

import lorimer
from lorimer.models.debug import make_debug_model
from tests.conformance.servers import RunningServer, create_key, running_server
from tests.surroundings import clean_surroundings

MODEL = "lorimer/tiny"
PLAIN = "test/plain"
"""Has no chat template."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
REPORT_BREACHES = """addEventListener('securitypolicyviolation', (event) => {
    console.error('policy', event.violatedDirective, event.blockedURI);
})"""
SECONDS = 60
"""How long a page may take; on a machine at rest it takes a second."""


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    with clean_surroundings():
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Open to everybody of this machine."""
    with running_server(tmp_path_factory.mktemp("open") / "data", [MODEL]) as running:
        yield running


@dataclass(frozen=True)
class KeyedServer:
    url: str
    data: Any
    key: str


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    """With one key, of alice, and a second model, whose engine starts when it is asked for."""
    folder = tmp_path_factory.mktemp("keyed")
    key = create_key(folder / "data", "alice")
    models = [MODEL, f"{PLAIN}={write_plain_model(folder / 'plain')}"]
    with running_server(folder / "data", models, start_engines="lazy") as running:
        yield KeyedServer(running.url, running.data, key)


def write_plain_model(directory: Path) -> Path:
    make_debug_model(directory)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    del config["chat_template"]
    file.write_text(json.dumps(config), "utf-8")
    return directory


# ── the browser ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Watch:
    """What must not happen in a page; `expected` are failures that a test provokes: statuses, or parts of messages."""

    expected: set[int | str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def follow(self, context: BrowserContext, url: str) -> None:
        context.on("console", self._hear)
        context.on("weberror", lambda error: self.problems.append(f"uncaught: {error.error}"))
        context.on("request", lambda request: self._see(request, url))
        context.add_init_script(REPORT_BREACHES)

    def _hear(self, message: ConsoleMessage) -> None:
        known = [f"status of {one} " if isinstance(one, int) else one for one in self.expected]
        if message.type in ("error", "warning") and not any(part in message.text for part in known):
            self.problems.append(f"{message.type}: {message.text}")

    def _see(self, request: Request, url: str) -> None:
        if not request.url.startswith((url + "/", "blob:", "data:")):
            self.problems.append(f"request to {request.url}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium; on Debian: apt-get install chromium")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def watch() -> Iterator[Watch]:
    watched = Watch()
    yield watched
    assert watched.problems == []


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, watch: Watch) -> Iterator[OpenPage]:
    """A page of a new browser profile: `open_page(url, path, key=..., phone=..., scheme="light" | "dark")`."""
    contexts: list[BrowserContext] = []

    def begin(url: str, path: str = "/", *, key: str = "", phone: bool = False, scheme: Any = "light") -> Page:
        context = browser.new_context(
            base_url=url,
            viewport=PHONE if phone else WIDE,
            has_touch=phone,
            color_scheme=scheme,
            reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
            storage_state=remembered(url, key),
        )
        contexts.append(context)
        context.set_default_timeout(SECONDS * 1000)
        watch.follow(context, url)
        page = context.new_page()
        page.goto(path)
        return page

    yield begin
    for context in contexts:
        context.close()


def remembered(url: str, key: str) -> Any:
    """What a browser has kept of an earlier visit: the key, if there is one."""
    kept = [{"name": "lorimer.key", "value": key}] if key else []
    return {"cookies": [], "origins": [{"origin": url, "localStorage": kept}]}


# ── training ────────────────────────────────────────────────────────────────────────────────────────────


class Trainer:
    """The SDK at work in a thread of its own; every method returns when it is done, `begin` immediately."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "sdk")

    def begin(self, work: Callable[..., Any], *values: Any, **named: Any) -> "Future[Any]":
        return self._pool.submit(work, *values, **named)

    def do(self, work: Callable[..., Any], *values: Any, **named: Any) -> Any:
        return self.begin(work, *values, **named).result(120)

    def run(self, url: str, *, key: str = "tml-local", rank: int = 4, **session: Any) -> lorimer.TrainingClient:
        """A new run; `run` are options of the run, `session` arguments of the service client."""
        metadata, options = session.pop("run_metadata", None), session.pop("run", {})

        def create() -> lorimer.TrainingClient:
            service = lorimer.ServiceClient(base_url=url, api_key=key, **session)
            return service.create_lora_training_client(MODEL, rank=rank, seed=0, user_metadata=metadata, **options)

        client: lorimer.TrainingClient = self.do(create)
        return client

    def train(self, client: lorimer.TrainingClient, num_steps: int, *, learning_rate: float = 2e-3) -> None:
        self.do(train, client, num_steps, learning_rate=learning_rate)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def train(client: lorimer.TrainingClient, num_steps: int, *, learning_rate: float = 2e-3, first: int = 1) -> None:
    """Steps on one sentence, with a metric of the client's own."""
    tokens = client.get_tokenizer().encode("My favourite colour is green, of course.")
    datum = lorimer.Datum(lorimer.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    for step in range(first, first + num_steps):
        result = client.forward_backward([datum], "cross_entropy")
        client.optim_step(lorimer.AdamParams(learning_rate=learning_rate)).result()
        client.log_metrics({"reward": 1 / (1 + result.result().metrics["loss:sum"])}, step=step).result()


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.close()
