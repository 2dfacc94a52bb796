"""One vLLM server process: its command, its environment, its log, and when it is ready or has ended.

It listens on a Unix socket in a directory that only this user can open: vLLM's routes for control need no key.
"""

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path

import httpx2

from lorimer.engine.config import EngineConfig
from lorimer.engine.model.device import Device, device_variables
from lorimer.errors import EngineError, InvalidInput

POLL_SECONDS = 0.25
NUM_LAST_LINES = 12
MODEL_NAME = "base"
"""What vLLM calls the model without an adapter, which is never sampled."""


class VllmServer:
    """Call `close` in the end; the server also ends with this process."""

    def __init__(self, config: EngineConfig, directory: Path, device: Device, max_context: int) -> None:
        assert config.vllm is not None
        self.folder = Path(tempfile.mkdtemp(prefix="lorimer-vllm-"))
        """For the socket, and the adapters that are made here."""
        self.socket = self.folder / "http.sock"
        python = config.vllm.python or sys.executable
        lifeline = [sys.executable, "-I", "-S", str(Path(__file__).with_name("lifeline.py")), str(self.folder)]
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        try:
            self._process = subprocess.Popen(
                [*lifeline, python, *arguments(config, directory, device, max_context, self.socket)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment(config, device, self.folder),
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise InvalidInput(f"vLLM cannot be started: {error}") from error
        self._log = threading.Thread(target=self._forward_log, name="vllm-log", daemon=True)
        self._log.start()

    @property
    def pid(self) -> int:
        """The process id of the leader of the server's process group."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_lines(self) -> str:
        """The end of its log."""
        return "\n".join(self._last_lines)

    def client(self) -> httpx2.AsyncClient:
        """Return a client that waits as long as the server needs."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket), limits=limits)
        return httpx2.AsyncClient(transport=transport, base_url="http://vllm", timeout=None)

    async def wait_until_ready(self, client: httpx2.AsyncClient) -> None:
        while not await is_healthy(client):
            if self.has_ended:
                self._log.join(1.0)
                raise EngineError(f"vLLM ended before it was ready; the end of its log:\n{self.last_lines}")
            await asyncio.sleep(POLL_SECONDS)

    async def wait_until_ended(self) -> None:
        while not self.has_ended:
            await asyncio.sleep(POLL_SECONDS)

    def _forward_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line.rstrip())
            sys.stderr.write(f"vllm: {line}")
            sys.stderr.flush()

    def close(self) -> None:
        """End the server and its processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # a process that was ending may have written to it once more


async def is_healthy(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx2.HTTPError:
        return False


def arguments(config: EngineConfig, directory: Path, device: Device, max_context: int, socket: Path) -> list[str]:
    """Return the arguments of the interpreter that has vLLM. Those of the settings come last and win."""
    vllm = config.vllm
    assert vllm is not None
    values = {
        "--model": str(directory),
        "--served-model-name": MODEL_NAME,
        "--uds": str(socket),
        "--dtype": str(device.dtype).removeprefix("torch."),
        "--max-model-len": str(max_context),
        "--tensor-parallel-size": str(vllm.tensor_parallel),
        "--max-loras": str(vllm.max_loras + 1),  # one for the base
        "--max-cpu-loras": str(2 * vllm.max_loras + 1),
        "--max-lora-rank": str(vllm.max_lora_rank),
        "--seed": str(secrets.randbits(31)),  # the default is the same for all servers, after each start
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        # Otherwise values of the model's generation_config.json apply to requests that do not set them.
        "--generation-config": "vllm",
    }
    flags = [
        "--enable-lora",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    if device.type == "cpu":
        flags.append("--enforce-eager")
    listed = [part for pair in values.items() for part in pair]
    return ["-m", "vllm.entrypoints.openai.api_server", *listed, *flags, *vllm.arguments]


def environment(config: EngineConfig, device: Device, folder: Path) -> dict[str, str]:
    """Return the environment of the vLLM server: this one, without what belongs to Lorimer's interpreter."""
    found = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    found |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    found |= device_variables(config, device)
    if "OMP_NUM_THREADS" in found:  # threads bound to cores would share these with the threads of the engine
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return found
