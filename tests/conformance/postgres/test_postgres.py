"""A server on PostgreSQL: what the official SDK asks of a database comes out the same, and the same faults only pause.

The database is one of its own, on loopback; without PostgreSQL's programs all of this is skipped.
"""

import threading
from collections.abc import Iterator

import httpx2
import numpy as np
import pytest
from tinker import types

from tests.conformance import test_admin, test_rest, test_service
from tests.conformance.samples import MODEL, RANK, TWIN, batch, current_logprobs, prompt_of, step
from tests.conformance.servers import create_key
from tests.conformance.users import User
from tests.faults.supervisor import Supervisor, eventually
from tests.store.postgres import PostgresServer, running

DATA = batch()
FROM_SERVICE = (
    "test_run_resumed_with_optimizer_goes_on_as_if_never_stopped",
    "test_run_from_weights_alone_starts_with_fresh_moments",
    "test_checkpoint_of_another_user_needs_that_users_token",
    "test_copy_into_the_session_has_the_weights_and_its_own_life",
    "test_session_carries_what_the_client_was_told",
    "test_close_records_reason_and_detail_once",
    "test_heartbeat_of_a_finished_session_is_gone",
    "test_sessions_of_a_user_are_listed_newest_first",
)

# Tests of what the database holds, run here again: the fixtures below lead them to the other server.
globals().update(
    {name: test for module in (test_admin, test_rest) for name, test in vars(module).items() if name[:5] == "test_"}
)
globals().update({name: getattr(test_service, name) for name in FROM_SERVICE})
learned, path = test_rest.learned, test_rest.path


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def server(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    data = tmp_path_factory.mktemp("postgres") / "data"
    models = [f"{name}=lorimer/debug" for name in (MODEL, TWIN)]
    with Supervisor(data, models=models, database=postgres.url(), poll_seconds=0.5) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def alice(server: Supervisor) -> User:
    return User(server.url, create_key(server.data, "alice"))


@pytest.fixture(scope="module")
def bob(server: Supervisor, alice: User) -> User:
    return User(server.url, create_key(server.data, "bob"))


def test_everything_is_in_the_database_that_was_named(postgres, server, trainer):
    assert postgres.execute(f"select base_model from runs where model_id = '{trainer.model_id}'") == [(MODEL,)]
    assert not list(server.data.glob("*.db*"))


def squared(logprobs, weights):
    return (weights * logprobs.square()).sum(), {}


def train(alice: User, disturb=lambda number: None) -> tuple[np.ndarray, list[int], list[float | None]]:
    """Five steps with a loss of one's own, a sampler after the second, a checkpoint at the end."""
    with alice.service() as service:
        loss = service.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
        trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=11)
        for number in range(5):
            trained = trainer.forward_backward_custom(DATA, loss)
            stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
            disturb(number)
            trained.result(), stepped.result()
            if number == 1:
                sampler = trainer.save_weights_and_get_sampling_client()
                scores = sampler.compute_logprobs(prompt_of([5, 6, 7, 8])).result()
        assert sampler.compute_logprobs(prompt_of([5, 6, 7, 8])).result() == pytest.approx(scores, abs=1e-5)
        params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
        tokens = sampler.sample(prompt_of([5, 6, 7, 8]), 1, params).result().sequences[0].tokens
        path = trainer.save_state("end").result().path
        names = [one.tinker_path for one in alice.rest().list_checkpoints(trainer.model_id).result().checkpoints]
        assert path in names
        return current_logprobs(trainer, DATA), tokens, scores


def assert_same(found: tuple, expected: tuple) -> None:
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    assert found[1] == expected[1]
    assert found[2][1:] == pytest.approx(expected[2][1:], abs=1e-5)


@pytest.fixture(scope="module")
def undisturbed(alice: User) -> tuple:
    return train(alice)


def test_kills_of_server_and_engine_only_pause(server, alice, undisturbed):
    def kill(number: int) -> None:
        if number in (1, 3):
            server.kill("both" if number == 1 else "engine")

    assert_same(train(alice, kill), undisturbed)


def test_a_database_that_is_killed_and_comes_back_only_pauses(postgres, server, alice, undisturbed):
    """While it is away the server says that it is not ready, and goes on by itself."""
    unready = []

    def restart(number: int) -> None:
        if number == 2:
            postgres.stop("immediate")
            try:
                eventually(lambda: httpx2.get(f"{server.url}/readyz", timeout=30).status_code == 503, "not ready", 30)
                unready.append(httpx2.get(f"{server.url}/readyz", timeout=30).json())
            finally:
                timer = threading.Timer(1.0, postgres.start)
                timer.start()

    ended = len(server.exit_codes)
    assert_same(train(alice, restart), undisturbed)
    assert "the database cannot be read" in unready[0]["reasons"]
    eventually(lambda: httpx2.get(f"{server.url}/readyz", timeout=30).status_code == 200, "ready")
    assert len(server.exit_codes) == ended, "the server stayed"


@pytest.mark.slow
def test_runs_go_on_after_a_restart_in_order(server, alice):
    with alice.service() as service:
        trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=5)
        step(trainer, DATA)
        before = current_logprobs(trainer, DATA)
        server.send(15)
        assert server.wait_for_end(len(server.exit_codes)) == 0
        server.wait_until_ready()
        np.testing.assert_allclose(current_logprobs(trainer, DATA), before, atol=1e-6)
        assert trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["optimizer_step"] == 2
