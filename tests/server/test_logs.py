"""Log lines: what they hold, and what they never hold."""

import json
import logging
from io import StringIO

import pytest

from lorimer.server.log_format import configure_logs, remove_logs

SECRETS = {
    "key": "tml-" + "aB3" * 14,
    "token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl",
    "database": "postgresql://user:hunter2pass@db/name",
    "address": "/api/v1/downloads/x?expires=1&signature=abcdef0123456789",
}


@pytest.fixture
def log():
    streams = []

    def begin(log_format, level="info"):
        stream = StringIO()
        handler = configure_logs(log_format, level, stream)
        streams.append(handler)
        return logging.getLogger("lorimer.test"), stream

    yield begin
    for handler in streams:
        remove_logs(handler)


def test_json_lines_have_the_fields(log):
    logger, stream = log("json")
    logger.info("hello %s", "you", extra={"request_id": "r1", "status": 200, "user_id": ""})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    expected = {"level": "info", "logger": "lorimer.test", "message": "hello you", "request_id": "r1", "status": 200}
    assert line == expected


def test_a_stream_that_is_no_terminal_gets_json(log):
    logger, stream = log("auto")
    logger.info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"


def test_plain_lines_cannot_be_forged(log):
    logger, stream = log("pretty")
    logger.warning("path %s", "a\n12:00:00 info forged\x1b[31m", extra={"request_id": "r1"})
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("request_id=r1")


@pytest.mark.parametrize("log_format", ["json", "pretty"])
@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_secrets_are_masked_in_messages_fields_and_tracebacks(log, log_format, secret):
    logger, stream = log(log_format)
    try:
        raise ValueError(f"failed with {secret}")
    except ValueError:
        logger.exception("trouble with %s", secret, extra={"field": secret})
    hidden = secret.rsplit("=", 1)[-1] if "signature" in secret else "hunter2pass" if "hunter2" in secret else secret
    assert hidden not in stream.getvalue()
    assert stream.getvalue().count("***") >= 3
    assert "ValueError" in stream.getvalue()


def test_level(log):
    logger, stream = log("json", "warning")
    logger.info("quiet")
    logger.warning("loud")
    assert len(stream.getvalue().splitlines()) == 1
