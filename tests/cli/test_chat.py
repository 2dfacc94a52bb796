"""``lorimer chat``: one answer, a conversation, its commands, Ctrl-C, and the service in the same process."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest

from lorimer.models.debug import make_debug_model
from tests.cli.commands import lorimer
from tests.conformance.servers import LORIMER, environment

MODEL = "lorimer/debug"
SHORT = ["--max-tokens", "8", "--seed", "3"]


def test_one_answer(alice):
    first = alice("chat", MODEL, *SHORT, "--once", "Hello")
    assert first.strip() and first == alice("chat", MODEL, *SHORT, "--once", "-", text="Hello")
    told = alice.json("chat", *SHORT, "--once", "Hello", "--system", "Be brief.")
    assert told["model"] == MODEL and told["usage"]["completion_tokens"] <= 8
    assert told["answer"] != first.rstrip("\n")


def test_control_codes_of_a_model_are_shown_and_not_obeyed(alice):
    for seed in range(3):
        answer = alice("chat", MODEL, "--max-tokens", "60", "--seed", seed, "--once", "x", "--temperature", "3")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", answer)


def test_a_checkpoint_is_talked_to(alice, bob, trained):
    assert alice("chat", trained.sampler, *SHORT, "--once", "Hello").strip()
    code, line = bob.refused("chat", trained.sampler, *SHORT, "--once", "Hello")
    assert code == 4 and "there is no checkpoint" in line


def test_what_is_not_served_is_refused(alice):
    code, line = alice.refused("chat", "gpt-9", "--once", "x")
    assert code == 2 and "'gpt-9' is not served" in line and MODEL in line


def test_a_conversation_with_commands(alice, tmp_path):
    file = tmp_path / "talk.json"
    lines = [
        "/system Be brief.",
        "Hello",
        "And?",
        f"/save {file}",
        "/reset",
        "Again",
        f"/save {tmp_path / 'second.json'}",
        "/model",
        "/model gpt-9",
        "/nonsense",
        "/exit",
        "not asked",
    ]
    run = alice.run("chat", *SHORT, text="\n".join(lines))
    assert run.exit_code == 0, run.stderr
    saved = json.loads(file.read_text("utf-8"))
    assert saved["model"] == MODEL
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    second = json.loads((tmp_path / "second.json").read_text("utf-8"))["messages"]
    assert [message["content"] for message in second[:2]] == ["Be brief.", "Again"]
    for said in ("is no command", "'gpt-9' is not served", "saved to", MODEL):
        assert said in run.stderr


def test_help_teaches():
    shown = lorimer("chat", "--help").stdout
    for word in ("--system", "--once", "--temperature", "--max-tokens", "tinker://"):
        assert word in shown


@pytest.mark.service
def test_embedded_and_without_a_template(tmp_path):
    """No server at all: the service runs in the command, on a model that only completes text."""
    directory = tmp_path / "plain"
    make_debug_model(directory)
    config = directory / "tokenizer_config.json"
    values = json.loads(config.read_text("utf-8"))
    values.pop("chat_template")
    config.write_text(json.dumps(values), "utf-8")
    variables = environment(LORIMER_DATA=str(tmp_path / "data"), HOME=str(tmp_path), LORIMER_NUM_THREADS="1")
    command = [*LORIMER, "chat", str(directory), *SHORT]
    run = subprocess.run(command, input="Once\nmore\n", env=variables, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "plain has no chat template" in run.stderr and len(run.stdout.splitlines()) >= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a terminal")
def test_ctrl_c_ends_the_answer_and_not_the_program(server, alice):
    ours, theirs = pty.openpty()
    variables = environment(LORIMER_BASE_URL=server.url, LORIMER_API_KEY=alice.key, TERM="dumb")
    command = [*LORIMER, "chat", "--max-tokens", "450"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    try:
        read_until(ours, "> ")
        seen = ""
        # An answer may be over before it can be interrupted, and readline may keep the interrupt to itself until the
        # next line: then there is the prompt, now or already.
        for _ in range(20):
            os.write(ours, b"Hello\n")
            seen = read_until(ours, r"Hello\r?\n.")
            process.send_signal(signal.SIGINT)
            seen = read_until(ours, r"\n> $", seen)
            if "(ended)" in seen:
                break
            os.write(ours, b"/reset\n")
            read_until(ours, r"/reset\r?\n(.|\n)*> $")
        assert "(ended)" in seen
        os.write(ours, b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)


def read_until(descriptor: int, pattern: str, seen: str = "") -> str:
    """Read what the program shows until it matches, after what has been ``seen``."""
    deadline = time.monotonic() + 60
    while not re.search(pattern, seen):
        assert time.monotonic() < deadline, seen
        if select.select([descriptor], [], [], 0.2)[0]:
            seen += os.read(descriptor, 4096).decode("utf-8", "replace")
    return seen
