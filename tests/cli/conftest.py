"""Two users of the server that the SDK's tests use too, and a run with a checkpoint of each kind."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import lorimer
from lorimer import types
from lorimer.server.control import CreateKey, ask_server
from tests.cli.commands import CommandLine
from tests.conformance.servers import RunningServer
from tests.surroundings import clean_environment  # noqa: F401

MODEL = "lorimer/debug"
RANK = 4


@pytest.fixture(scope="session")
def server(keyed_server: RunningServer) -> RunningServer:
    return keyed_server


def command_line(server: RunningServer, user: str) -> CommandLine:
    """The commands of a new user."""
    reply = ask_server(server.data, CreateKey(user, user))
    assert reply is not None and reply.keys[0].secret
    return CommandLine(server.url, reply.keys[0].secret)


@pytest.fixture(scope="session")
def alice(server: RunningServer) -> CommandLine:
    return command_line(server, "alice")


@pytest.fixture(scope="session")
def bob(server: RunningServer) -> CommandLine:
    return command_line(server, "bob")


@dataclass(frozen=True)
class TrainedRun:
    session_id: str
    trainer: lorimer.TrainingClient
    training: str
    sampler: str
    external: str

    @property
    def run_id(self) -> str:
        return self.trainer.model_id


@pytest.fixture(scope="session")
def trained(alice: CommandLine) -> Iterator[TrainedRun]:
    """A run that was trained, sampled and saved in every way."""
    metadata = {"purpose": "cli [bold]\x1b[31m"}
    with lorimer.ServiceClient(metadata, base_url=alice.url, api_key=alice.key, display_name="Command line") as service:
        trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=0, user_metadata=metadata)
        tokens = list(range(10, 30))
        datum = types.Datum(
            types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * 19}
        )
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        saved = [trainer.save_state("first"), trainer.save_weights_for_sampler("final")]
        external = trainer.save_weights_external("export").result().path
        paths = [future.result().path for future in saved]
        sampler = service.create_sampling_client(model_path=paths[1])
        sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=3)).result()
        service.create_lora_training_client(MODEL, rank=1)
        yield TrainedRun(service.holder.session_id, trainer, paths[0], paths[1], external)
