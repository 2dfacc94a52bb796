"""Trace one ``forward_backward`` and one ``sample`` through the server, and count what a reader has to follow.

``python tools/trace_request.py`` starts the application in this process, with a real engine beside it, sends each
request until its paths are warm, then once more under ``sys.setprofile`` in every thread. It prints the functions and
files of ours that were entered, and how often the path went from one file to another; ``--list`` prints every call.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import numpy as np

import lorimer
from lorimer import types
from lorimer.server.app import create_app
from lorimer.server.settings import Settings
from lorimer.types.encoding import encode_training_request

ROOT = Path(lorimer.__file__).parent
MODEL = "lorimer/tiny"
WARM_UP = 3
PROTOBUF = "application/x-protobuf"


@dataclass
class Trace:
    """Calls of our functions, in order, by thread."""

    calls: list[tuple[int, str, str]] = field(default_factory=list)

    def functions(self, folder: str = "") -> set[tuple[str, str]]:
        return {(file, name) for _, file, name in self.calls if file.startswith(folder)}

    def files(self, folder: str = "") -> Counter[str]:
        return Counter(file for _, file, _ in self.calls if file.startswith(folder))

    def changes(self, folder: str, thread: int) -> int:
        """How often the path goes from one file of the folder to another, on one thread."""
        path = [file for caller, file, _ in self.calls if file.startswith(folder) and caller == thread]
        return sum(one != other for one, other in itertools.pairwise(path))


class Tracer:
    """Notes calls while it is on. It must be installed before the threads start that it is to see."""

    def __init__(self) -> None:
        self._trace: Trace | None = None
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def on(self) -> Iterator[Trace]:
        self._trace = trace = Trace()
        try:
            yield trace
        finally:
            self._trace = None

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self._trace is not None and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                file = str(path.relative_to(ROOT))
                self._trace.calls.append((threading.get_ident(), file, frame.f_code.co_qualname))


Call = Callable[[], Awaitable[None]]


class Client:
    """The requests that an SDK sends, one by one."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http
        self.session_id = self.model_id = self.sampler_id = ""
        self.seq_id = 0

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(f"/api/v1/{path}", json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def open(self) -> None:
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        self.session_id = (await self.post("create_session", session))["session_id"]
        body = {"session_id": self.session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
        created = await self.post("create_model", body)
        self.model_id = created["model_id"]
        await self.result(created["request_id"])
        body = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
        self.sampler_id = (await self.post("create_sampling_session", body))["sampling_session_id"]

    async def result(self, request_id: str) -> bytes:
        while True:
            answer = await self.http.post(
                "/api/v1/retrieve_future", json={"request_id": request_id}, headers={"accept": PROTOBUF}
            )
            if answer.status_code == HTTPStatus.REQUEST_TIMEOUT:  # still pending
                continue
            answer.raise_for_status()
            if b"try_again" not in answer.content:
                return bytes(answer.content)

    def forward_backward(self) -> Call:
        self.seq_id += 1
        tokens = list(range(2, 18))
        arrays = {"target_tokens": np.array(tokens), "weights": np.ones(len(tokens), "f4")}
        inputs = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
        datum = types.Datum(types.ModelInput.from_ints(tokens), inputs)
        body = encode_training_request(types.TrainingRequest(self.model_id, self.seq_id, [datum], "cross_entropy"))

        async def call() -> None:
            answer = await self.http.post("/api/v1/forward_backward", content=body, headers={"content-type": PROTOBUF})
            answer.raise_for_status()
            await self.result(answer.json()["request_id"])

        return call

    def sample(self) -> Call:
        self.seq_id += 1
        body = {
            "sampling_session_id": self.sampler_id,
            "seq_id": self.seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [2, 3, 4, 5]}]},
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }

        async def call() -> None:
            await self.result((await self.post("asample", body))["request_id"])

        return call


def report(name: str, trace: Trace, loop_thread: int) -> str:
    inside = len(trace.functions("scheduler/")), len(trace.files("scheduler/"))
    rows = [
        ("functions / files entered", f"{len(trace.functions())} / {len(trace.files())}"),
        ("functions / files entered in scheduler/", f"{inside[0]} / {inside[1]}"),
        ("changes of file inside scheduler/ on the event loop", str(trace.changes("scheduler/", loop_thread))),
    ]
    lines = [f"| one `{name}`, server side | |", "|---|---:|", *(f"| {what} | {count} |" for what, count in rows)]
    return "\n".join(lines)


async def run(is_listing: bool) -> None:
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(data=Path(folder), models=(MODEL,)))
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=120) as http:
                client = Client(http)
                await client.open()
                for name, prepare in (("forward_backward", client.forward_backward), ("sample", client.sample)):
                    for _ in range(WARM_UP):
                        await prepare()()
                    call = prepare()  # encoding the request is the client's work
                    with tracer.on() as trace:
                        await call()
                    print(report(name, trace, threading.get_ident()), end="\n\n")
                    if is_listing:
                        print("\n".join(f"{file:40} {function}" for _, file, function in trace.calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every call in order")
    asyncio.run(run(parser.parse_args().list))


if __name__ == "__main__":
    main()
