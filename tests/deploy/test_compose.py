"""The services of ``deploy/compose.yaml``, run as plain processes with its commands, variables and files."""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
import tinker
import yaml  # type: ignore[import-untyped]
from tinker import types

from tests.cluster.installation import Member, find_nginx, missing_programs
from tests.conformance.conftest import LEFT_OPEN
from tests.conformance.servers import LORIMER
from tests.deploy.test_files import DEPLOY
from tests.faults.supervisor import eventually, free_port
from tests.store.buckets import BUCKET, KEY, SECRET, find_weed, moto, seaweedfs
from tests.store.postgres import running

pytestmark = [pytest.mark.timeout(900), *(pytest.mark.filterwarnings(one) for one in LEFT_OPEN)]


@pytest.fixture(scope="module", autouse=True)
def no_garbage_for_others() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Return the URL of the balancer, and a key."""
    if missing := missing_programs():
        pytest.skip(missing)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (tmp_path / "secret").write_text("s" * 64)
    with ExitStack() as stack:
        postgres = stack.enter_context(running())
        (tmp_path / "bucket").mkdir()
        bucket = stack.enter_context((seaweedfs if find_weed() else moto)(tmp_path / "bucket"))
        ports = {name: free_port() for name in ("api1", "api2", "worker", "balancer")}
        # What containers have and processes of one machine do not: names, addresses and folders of their own.
        known = {
            "postgresql://lorimer@postgres:5432/lorimer": postgres.url(),
            "http://seaweedfs:8333": bucket,
            "s3://lorimer/": f"s3://{BUCKET}/",
            "/etc/lorimer/lorimer.toml": str(tmp_path / "lorimer.toml"),
            "/run/secrets/lorimer": str(tmp_path / "secret"),
            "9100": str(ports["worker"]),
            "api1:8000": f"127.0.0.1:{ports['api1']}",
            "api2:8000": f"127.0.0.1:{ports['api2']}",
            "listen 8080": f"listen 127.0.0.1:{ports['balancer']}",
        }

        def local(text: str) -> str:
            for theirs, ours in known.items():
                text = text.replace(theirs, ours)
            return text

        (tmp_path / "lorimer.toml").write_text(local((DEPLOY / "lorimer.toml").read_text()))
        variables = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

        def start(name: str, *command: str) -> Member:
            service = compose["services"][name]
            given = {key: local(value) for key, value in service["environment"].items()} | variables
            given |= {"LORIMER_DATA": str(tmp_path / name), "LORIMER_WORKER_HOST": "127.0.0.1"}
            words = [local(word) for word in (command or service["command"])]
            words = [{"8000": str(ports[name]), "0.0.0.0": "127.0.0.1"}.get(word, word) for word in words]
            member = Member(name, [*LORIMER, *words], tmp_path / f"{name}{len(command)}.log", given)
            stack.callback(member.stop)
            return member

        worker = start("worker")
        key = created_key(start("worker", "key", "create", "alice"))
        for name in ("api1", "api2"):
            start(name)
        (tmp_path / "nginx").mkdir()
        text = local((DEPLOY / "nginx.conf").read_text())
        user = "user root root;\n" if os.getuid() == 0 else ""
        paths = "".join(f"{kind}_temp_path {tmp_path}/nginx/{kind};" for kind in ("client_body", "proxy", "fastcgi"))
        paths += "".join(f"{kind}_temp_path {tmp_path}/nginx/{kind};" for kind in ("uwsgi", "scgi"))
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"{user}daemon off; pid {tmp_path}/nginx.pid;\n" + text.replace("http {", "http {" + paths, 1)
        )
        balancer = Member("nginx", [str(find_nginx()), "-p", str(tmp_path), "-c", str(config)], tmp_path / "nginx.log")
        stack.callback(balancer.stop)
        url = f"http://127.0.0.1:{ports['balancer']}"
        eventually(lambda: is_ready(url), "the balancer has a ready API replica")
        assert httpx2.get(f"{url}/metrics").status_code == 404
        found = httpx2.get(f"http://127.0.0.1:{ports['worker']}/metrics").raise_for_status()
        assert "lorimer_engine_state" in found.text and not worker.exit_codes
        yield url, key


def created_key(member: Member) -> str:
    eventually(lambda: member.exit_codes, "a key was created")
    member.stop()
    assert member.exit_codes[0] == 0, member.logged()
    return member.logged().split()[0]


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx2.HTTPError:
        return False


def test_a_program_trains_and_samples(place):
    url, key = place
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        trainer = service.create_lora_training_client("lorimer/tiny", rank=4, seed=1)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(list(range(10, 40))),
            loss_fn_inputs={"target_tokens": list(range(11, 41)), "weights": [1.0] * 30},
        )
        losses = []
        for _ in range(5):
            trained = trainer.forward_backward([datum], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            losses.append(trained.result().metrics["loss:sum"])
        assert losses[-1] < losses[0]
        sampler = trainer.save_weights_and_get_sampling_client()
        found = sampler.sample(types.ModelInput.from_ints([10, 11]), 1, types.SamplingParams(max_tokens=4)).result()
        assert found.sequences[0].tokens
