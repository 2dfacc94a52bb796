"""Why work is waiting: said once, in the server's words."""

import logging

import lorimer
from lorimer.client.polling import REPEAT_SECONDS, QueueNotes
from lorimer.types import TryAgainResponse
from tests.conformance.servers import running_server


def test_waiting_for_a_model_to_load_is_told_once(tmp_path, caplog):
    """The engine is loaded on first use, which takes longer than many polls of this server."""
    with (
        running_server(tmp_path / "data", ["lorimer/debug"], poll_seconds=0.1, start_engines="lazy") as server,
        caplog.at_level(logging.INFO, logger="lorimer"),
        lorimer.ServiceClient(base_url=server.url) as service,
    ):
        trainer = service.create_lora_training_client("lorimer/debug", rank=2)
    (told,) = [record for record in caplog.records if "is waiting" in record.getMessage()]
    assert told.levelno == logging.WARNING
    assert told.getMessage().startswith("creating a run on lorimer/debug is waiting: ")
    assert len(told.getMessage()) > len("creating a run on lorimer/debug is waiting: ")
    assert trainer.model_id


def test_reason_is_told_again_only_after_a_while(caplog):
    notes = QueueNotes("training of s:train:0")
    paused = TryAgainResponse(request_id="r", queue_state="paused_capacity", queue_state_reason=None)
    active = TryAgainResponse(request_id="r", queue_state="active", queue_state_reason=None)
    with caplog.at_level(logging.WARNING, logger="lorimer"):
        for answer in (active, paused, paused, active, paused):
            notes.on_progress(answer)
        assert caplog.messages == ["training of s:train:0 is waiting: the server has no room at the moment"]
        notes._said_at -= REPEAT_SECONDS
        notes.on_progress(paused)
    assert len(caplog.messages) == 2
