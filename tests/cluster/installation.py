"""An installation of several processes: API replicas behind nginx, workers, and a PostgreSQL server of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx2
import psutil

from tests.conformance.servers import LORIMER, children, environment, is_engine
from tests.faults.supervisor import WAIT_SECONDS, eventually, free_port
from tests.store.buckets import BUCKET, find_weed, moto, seaweedfs, variables
from tests.store.postgres import PostgresServer, find_binaries, running

NGINX = """\
daemon off;
{user}
pid {directory}/nginx.pid;
error_log stderr warn;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream api {{ {upstreams} }}
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 0;
        location / {{
            proxy_pass http://api;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host:$server_port;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_read_timeout 300s;
            proxy_buffering off;
        }}
    }}
}}
"""


def missing_programs() -> str:
    """Say what is missing on this machine; empty if nothing is."""
    if find_binaries() is None:
        return "PostgreSQL's initdb is not installed (Debian: apt-get install postgresql)"
    if find_nginx() is None:
        return "nginx is not installed (Debian: apt-get install nginx)"
    return ""


def find_nginx() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


class Member:
    """A process that is started again when it ends, until `stop`."""

    def __init__(self, name: str, command: list[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        self.name, self.command, self.log = name, command, log
        self.exit_codes: list[int] = []
        self._environment = environment(**(extra or {}))
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._is_ending.is_set():
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(self.command, env=self._environment, stdout=log, stderr=log)
            self.exit_codes.append(self._process.wait())
            self._is_ending.wait(0.2)

    @property
    def pid(self) -> int:
        eventually(lambda: self._process is not None, f"{self.name} was started")
        assert self._process is not None
        return self._process.pid

    def engines(self) -> list[psutil.Process]:
        return [child for child in children(self.pid) if is_engine(child)]

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process without a warning; return when it has ended."""
        ended = len(self.exit_codes)
        self.send(signal.SIGKILL)
        eventually(lambda: len(self.exit_codes) > ended, f"{self.name} ended")

    def kill_engine(self) -> None:
        for engine in self.engines()[:1]:
            engine.kill()

    def stop(self) -> None:
        self._is_ending.set()
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        self._keeper.join(WAIT_SECONDS)

    def logged(self) -> str:
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""


class Installation:
    """Use as a context."""

    def __init__(
        self,
        directory: Path,
        models: Mapping[str, str],
        *,
        num_apis: int = 2,
        num_workers: int = 2,
        num_replicas: int = 2,
        users: Sequence[str] = (),
        objects: str = "",
        extra: Mapping[str, str] | None = None,
        postgres: PostgresServer | None = None,
        database: str = "postgres",
        ranks: int = 1,
        **settings: object,
    ) -> None:
        """``models`` are sources by name, each with ``num_replicas`` for each worker, of ``ranks``; ``users`` get keys.

        With ``objects``, the URL of an object store, each process has a data directory of its own; without, they
        share one. ``extra`` are environment variables of all processes.
        """
        self.directory, self.data = directory, directory / "data"
        self.config = directory / "lorimer.toml"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.apis: list[Member] = []
        self.workers: list[Member] = []
        self.metrics_ports: list[int] = []
        self.ports = [free_port() for _ in range(num_apis)]
        self._models, self._num_workers, self._num_replicas, self._ranks = models, num_workers, num_replicas, ranks
        self.keys = dict.fromkeys(users, "")
        self._objects, self._extra = objects, extra or {}
        self._given, self._database, self._settings = postgres, database, settings
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.postgres = self._given or self._stack.enter_context(running())
        self.config.write_text(self._toml())
        for user in self.keys:
            self.keys[user] = self.create_key(user)
        for number in range(self._num_workers):
            self.add_worker(number)
        for number, port in enumerate(self.ports):
            command = [*LORIMER, "serve", "--role", "api", "--config", str(self.config), "--port", str(port)]
            name = f"api-{number}"
            self.apis.append(self._member(name, [*command, "--data", str(self.data_of(name))]))
        nginx = self.directory / "nginx"
        nginx.mkdir(mode=0o755)
        upstreams = " ".join(f"server 127.0.0.1:{port} max_fails=1 fail_timeout=1s;" for port in self.ports)
        user = "user root root;" if os.getuid() == 0 else ""  # else its workers could not enter the directory
        text = NGINX.format(user=user, directory=nginx, upstreams=upstreams, port=self.url.rpartition(":")[2])
        (nginx / "nginx.conf").write_text(text)
        program = find_nginx()
        assert program is not None
        self._member("nginx", [program, "-p", str(nginx), "-c", str(nginx / "nginx.conf")])
        for port in self.ports:
            eventually(lambda port=port: self._answers(port), "API replicas are ready")

    def _toml(self) -> str:
        settings = {
            "database": self.postgres.url(self._database),
            "data": str(self.data),
            "dtype": "float32",
            "num_threads": 1,
            "log_format": "json",
            "trusted_proxies": ["127.0.0.1"],
            "worker_replicas": self._num_replicas * len(self._models),
            "lease_seconds": 3.0,
        } | self._settings
        if self._objects:
            secret = self.directory / "secret"
            secret.write_text(secrets.token_hex(32))
            settings |= {"objects": self._objects, "secret_file": str(secret)}
        lines = [f"{name} = {_toml(value)}" for name, value in settings.items()]
        for name, source in self._models.items():
            lines += [
                f'[model."{name}"]',
                f'source = "{source}"',
                f"replicas = {self._num_replicas * self._num_workers}",
                f"ranks = {self._ranks}",
            ]
        return "\n".join(lines) + "\n"

    def data_of(self, name: str) -> Path:
        """Return the data directory of a process."""
        return self.directory / f"data-{name}" if self._objects else self.data

    def add_worker(self, number: int) -> Member:
        name = f"worker-{number}"
        command = [*LORIMER, "worker", "--config", str(self.config), "--data", str(self.data_of(name))]
        self.metrics_ports.append(free_port())
        command += ["--set", f"worker_metrics_port={self.metrics_ports[-1]}"]
        self.memory_of(number).mkdir(parents=True)
        member = self._member(name, command, TMPDIR=str(self.memory_of(number)))
        self.workers.append(member)
        return member

    def memory_of(self, number: int) -> Path:
        """Return where the engines of a worker reserve memory, as if it had a machine of its own."""
        return self.directory / f"memory-{number}"

    def _member(self, name: str, command: list[str], **extra: str) -> Member:
        member = Member(name, command, self.directory / f"{name}.log", {**self._extra, **extra})
        self._stack.callback(member.stop)
        return member

    def _answers(self, port: int) -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/readyz", timeout=30).status_code == 200
        except httpx2.HTTPError:
            return False

    def create_key(self, user: str) -> str:
        command = [*LORIMER, "key", "create", user, "--config", str(self.config)]
        done = subprocess.run(command, env=environment(**self._extra), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def logged(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text('utf-8', 'replace')[-4000:]}" for path in self.directory.glob("*.log")
        )


IS_CLUSTER = bool(os.environ.get("LORIMER_TEST_CLUSTER"))
"""Whether tests that serve by `whole_installation` do so, instead of by one process."""
IS_RAY = os.environ.get("LORIMER_TEST_CLUSTER") == "ray"
"""Whether its workers are placed by Ray."""


@contextmanager
def whole_installation(
    folder: Path, models: Sequence[str], users: Sequence[str] = (), **settings: object
) -> Iterator[Installation]:
    """Serve by two API replicas and two workers, each with two replicas of each model, over PostgreSQL and S3.

    With Ray, whose nodes must be there, a worker has two replicas of one model, and objects are in a directory.
    """
    named = dict(model.split("=", 1) if "=" in model else (model, model) for model in models)
    bucket = folder / "bucket"
    bucket.mkdir(parents=True)
    if IS_RAY:
        from tests.ray.clusters import RayInstallation

        options = {"num_replicas": 2, "worker_replicas": 2, "objects": f"file://{bucket}"}
        with RayInstallation(folder, named, users=users, **options, **settings) as opened:
            yield opened
        return
    with (seaweedfs if find_weed() else moto)(bucket) as url:
        objects = {"objects": f"s3://{BUCKET}/lorimer", "extra": variables(url)}
        with Installation(folder, named, num_replicas=2, users=users, **objects, **settings) as opened:
            yield opened


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')
