"""Every error of the tree has a status, a code and a body in the one shape."""

import inspect
import json

import pytest
from starlette.requests import Request

from lorimer import errors
from lorimer.server.errors import STATUS, Refusal, answer_error, error_response, printable, status_of

NEVER_ANSWERED = {
    errors.NoServer,
    errors.InUse,
    errors.PortTaken,
    errors.TornDownload,
    errors.HubError,
    errors.Fenced,  # ends a worker, which answers nobody
}
"""Raised on the user's machine or before a server listens."""
TREE = {item for item in vars(errors).values() if inspect.isclass(item)} - NEVER_ANSWERED
KINDS = sorted(TREE, key=lambda kind: kind.__name__)
SCOPE = {"type": "http", "path": "/api/v1/x", "state": {"request_id": "r1"}, "headers": []}


def test_every_error_has_its_own_row():
    assert set(STATUS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_every_error_is_answered_in_the_one_shape(kind):
    answer = await answer_error(Request(SCOPE), kind("what went wrong"))
    assert json.loads(answer.body) == {"detail": "what went wrong", "code": STATUS[kind][1], "request_id": "r1"}
    assert answer.status_code == STATUS[kind][0]
    assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_no_body_is_empty(kind):
    answer = await answer_error(Request(SCOPE), kind())
    assert json.loads(answer.body)["detail"]


def test_no_error_is_a_conflict():
    assert 409 not in {status for status, _ in STATUS.values()}, "the SDK repeats a 409 for minutes"


def test_statuses_of_the_contract():
    expected = {
        errors.InvalidInput: 400,
        errors.TooLarge: 413,
        errors.Unsupported: 400,
        errors.NotFound: 404,
        errors.Unauthorized: 401,
        errors.Forbidden: 403,
        errors.Gone: 410,
        errors.Busy: 429,
        errors.StorageError: 503,
    }
    assert {kind: STATUS[kind][0] for kind in expected} == expected


def test_an_error_not_in_the_table_takes_the_row_of_its_parent():
    class Odd(errors.NotFound):
        pass

    assert status_of(Odd("x")) == (404, "not_found")


def test_full_disk_is_507():
    assert status_of(errors.DiskFull("the disk is full: 3 bytes are free")) == (507, "disk_full")
    try:
        raise errors.StorageError("cannot write") from OSError(28, "No space left on device")
    except errors.StorageError as error:
        assert status_of(error) == (507, "disk_full")


async def test_refusal_has_its_own_status_and_headers():
    answer = await answer_error(Request(SCOPE), Refusal(418, "teapot", "short and stout", {"x-a": "b"}))
    assert (answer.status_code, answer.headers["x-a"]) == (418, "b")
    assert json.loads(answer.body)["code"] == "teapot"


def test_quoted_input_cannot_carry_control_codes():
    assert printable("a\x1b[31m\x00\ud800b\n") == "a\\x1b[31m\\x00\\ud800b\n"
    answer = error_response(SCOPE, 400, "x", "\ud800")
    assert json.loads(answer.body)["detail"] == "\\ud800"


async def test_unknown_path_and_method_have_the_shape_too(start):
    async with start() as running:
        missing = await running.http.get("/nowhere")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
        wrong = await running.http.delete("/size")
        assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"
        slash = await running.http.get("/api/v1/healthz/")
        assert slash.status_code == 404
