"""Several processes with data directories of their own: all that they share is PostgreSQL and an object store."""

import gc
import os
import shutil
import time
from collections.abc import Iterator

import pytest
import tinker
from tinker import types

from tests.cluster.installation import Installation, missing_programs
from tests.conformance.conftest import LEFT_OPEN
from tests.conformance.users import User
from tests.faults.programs import RunningProgram, assert_same, expectation, finish_all
from tests.faults.supervisor import eventually
from tests.faults.tenant import MODEL, Plan
from tests.faults.test_kills import done
from tests.store.buckets import BUCKET, FaultProxy, moto, seaweedfs, variables

# The SDK leaves its first connection of each client to the garbage collector.
pytestmark = [pytest.mark.timeout(1800), *(pytest.mark.filterwarnings(one) for one in LEFT_OPEN)]


GONE_SECONDS = float(os.environ.get("LORIMER_GONE_SECONDS", "2"))


@pytest.fixture(scope="module", autouse=True)
def no_garbage_for_others() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def proxy(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    if missing := missing_programs():
        pytest.skip(missing)
    start = {"moto": moto, "seaweedfs": seaweedfs}[request.param]
    with start(tmp_path_factory.mktemp("bucket")) as url:
        made = FaultProxy(url)
        yield made
        made.close()


@pytest.fixture(scope="module")
def installation(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("objects") / "installation"
    with Installation(
        folder,
        {MODEL: MODEL},
        num_replicas=1,
        users=["alice"],
        objects=f"s3://{BUCKET}/cluster",
        extra=variables(proxy.url),
        snapshot_seconds=0.2,
    ) as opened:
        yield opened


@pytest.fixture
def alice(installation: Installation) -> User:
    return User(installation.url, installation.keys["alice"])


def program(installation: Installation, plan: Plan, folder) -> RunningProgram:
    return RunningProgram(installation.url, installation.keys["alice"], plan, folder)


def test_a_run_goes_on_where_nothing_of_it_is_local(installation, proxy, tmp_path):
    """Its worker is killed with its directory; then the store is gone for a while. The weights are the same."""
    plan = Plan(seed=3, steps=12, load_at=6)
    first = program(installation, plan, tmp_path / "undisturbed")
    finish_all([first])
    known = expectation(first)
    second = program(installation, plan, tmp_path / "disturbed")
    eventually(lambda: done([second]) >= 4, "four steps", 300)
    for number, worker in enumerate(installation.workers):
        worker.kill()
        shutil.rmtree(installation.data_of(f"worker-{number}"), ignore_errors=True)
    eventually(lambda: done([second]) >= 8, "eight steps", 300)
    proxy.inject("gone")
    eventually(lambda: proxy.num_faults < 1_000_000 - 5, "requests that found no store", 120)
    time.sleep(GONE_SECONDS)
    proxy.inject("", 0)
    finish_all([second])
    assert_same(second, known)


def test_checkpoints_and_large_payloads_cross_data_directories(installation, alice):
    with alice.service() as service:
        trainer = service.create_lora_training_client(MODEL, rank=4, seed=1)
        text = [5 + i % 250 for i in range(401)]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(text[:-1]),
            loss_fn_inputs={"target_tokens": text[1:], "weights": [1.0] * 400},
        )
        trained = trainer.forward_backward([datum] * 60, "cross_entropy")  # more than is kept in a row
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert trained.result().metrics["loss:sum"] > 0
        path = trainer.save_state("end").result().path
        again = service.create_training_client_from_state(path)
        both = [client.forward([datum], "cross_entropy").result().metrics["loss:sum"] for client in (trainer, again)]
        assert both[0] == pytest.approx(both[1], rel=1e-6)
        sampler = trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=4, seed=1)
        assert sampler.sample(types.ModelInput.from_ints(text[:3]), 1, params).result().sequences
        rest: tinker.RestClient = alice.rest()
        assert path in [one.tinker_path for one in rest.list_checkpoints(trainer.model_id).result().checkpoints]
    stored = installation.postgres.execute("select count(*) from blobs where file is not null")
    assert stored[0][0] > 0, "the payload is an object"
