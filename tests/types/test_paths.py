"""Paths and names of checkpoints."""

import pytest
import tinker

from lorimer.errors import InvalidInput
from lorimer.types import (
    ParsedCheckpointTinkerPath,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    check_name,
    checkpoint_path,
    parse_path,
)

PATHS = {
    "training": "tinker://s:train:0/weights/step-10",
    "sampler": "tinker://s:train:0/sampler_weights/final",
    "external": "tinker://s:train:0/external_weights/a.b_c",
}


@pytest.mark.parametrize(("kind", "path"), PATHS.items(), ids=PATHS)
def test_path_is_taken_apart_as_officially(kind, path):
    ours, official = parse_path(path), tinker.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert ours.model_dump() == official.model_dump()
    assert ours.checkpoint_type == kind
    assert checkpoint_path(ours.training_run_id, kind, ours.name) == path


WRONG = [
    "",
    "tinker://",
    "tinker://run",
    "tinker://run/weights",
    "tinker://run/weights/",
    "tinker:///weights/a",
    "tinker://run/weights/a/b",
    "tinker://run/adapter/a",
    "tinker://run//a",
    "http://run/weights/a",
    "run/weights/a",
    " tinker://run/weights/a",
    "TINKER://run/weights/a",
]


@pytest.mark.parametrize("path", WRONG, ids=repr)
def test_wrong_path_is_refused(path):
    with pytest.raises(InvalidInput, match="tinker://<run>/<segment>/<name>"):
        parse_path(path)
    with pytest.raises(ValueError, match="tinker://<run>/<segment>/<name>"):
        ParsedCheckpointTinkerPath.from_tinker_path(path)


@pytest.mark.parametrize("name", ["a", "0", "step-10", "a.b_c-D", "x" * 128], ids=len)
def test_name_is_accepted(name):
    assert check_name(name) == name


REFUSED = [
    *["", ".", "..", "a..b", ".hidden", "-a", "_a", "a/b", "a\\b", "a%2fb", "a b", "a\n", "a\0", "é", "a:b", "~"],
    *["x" * 129, "a" * 10**6],
]


@pytest.mark.parametrize("name", REFUSED, ids=[repr(name)[:20] for name in REFUSED])
def test_name_is_refused(name):
    with pytest.raises(InvalidInput, match="1 to 128") as raised:
        check_name(name)
    assert len(str(raised.value)) < 500


def test_links_lead_to_the_server_in_use(monkeypatch):
    monkeypatch.delenv("LORIMER_BASE_URL", raising=False)
    monkeypatch.setenv("TINKER_BASE_URL", "http://trainer:9000/prefix/")
    path = PATHS["sampler"]
    checkpoint = "http://trainer:9000/prefix/console/checkpoints/s%3Atrain%3A0/sampler_weights%2Ffinal"
    assert SaveWeightsResponse(path=path).get_console_url() == checkpoint
    assert SaveWeightsForSamplerResponse(path=path).get_console_url() == checkpoint
    playground = SaveWeightsForSamplerResponse(path=path).get_playground_url()
    assert playground.startswith(
        "http://trainer:9000/prefix/console/playground?mode=checkpoint&checkpoint=tinker%3A%2F%2F"
    )
    monkeypatch.delenv("TINKER_BASE_URL")
    assert SaveWeightsResponse(path=path).get_console_url().startswith("http://127.0.0.1:8000/console/")
