"""What a person does wrong with a recipe is told in one line: flags, files, addresses, keys."""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from lorimer.client import transport
from lorimer.terminal import recipe_app
from tests.conformance.servers import create_key, environment, running_server
from tests.server.processes import Process

PAIR = {"question": "1 + 1?", "answer": "#### 2"}
BAD_FILES = {
    "missing.jsonl": (None, "No such file"),
    "empty.jsonl": ("", "is empty; at least one row is needed"),
    "blank.json": ("[]", "is empty; at least one row is needed"),
    "cut.jsonl": ('{"question": "a"', "line 1 of .* is no JSON"),
    "cut.json": ('[{"question": "a"', "is no JSON"),
    "list.jsonl": ("[1, 2]", "an object is accepted"),
    "object.json": ("{}", "no list of objects"),
    "numbers.json": ("[1]", "no list of objects"),
    "fields.jsonl": (f'{json.dumps(PAIR)}\n{{"text": "a"}}\n', "row 2 of the data"),
    "messages.jsonl": ('{"messages": "hello"}\n', "row 1 of the data: messages is 'hello'"),
    "null.jsonl": ('{"messages": null}\n', "row 1 of the data: messages is None"),
    "latin.jsonl": (b'{"question": "\xe9"}', "is no UTF-8 text"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_data_that_cannot_be_used(name, refused_recipe, base_url, tmp_path):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for recipe in ("chat_sft", "rl_gsm8k"):
        code, line = refused_recipe(recipe, "--data", name, "--base-url", base_url)
        assert code == 2
        if recipe == "chat_sft" or "messages" not in message:
            assert re.search(message, line), line


WRONG = {
    "a rank that no server has": (["sl_loop", "--rank", "100000"], "100000"),
    "more held out than there is": (["dpo", "--num-held-out", "1000"], "num_held_out is 1000 and there are 1000 rows"),
    "a loss that is none": (["arithmetic_rl", "--loss-fn", "nll"], "loss_fn is 'nll'"),
    "a model that is not served": (["teach_its_name", "--model", "nobody/nothing"], "nobody/nothing"),
    "a checkpoint that is not there": (["inference_gsm8k", "--model", "tinker://a:train:0/weights/b"], "a:train:0"),
    "rates that are no numbers": (["sweep", "--learning-rates", "fast"], "'fast'"),
    "a method that is none": (["methods", "--methods", "dora-8"], "'dora-8' is not a method"),
    "a method that is named twice": (["methods", "--methods", "full,full"], "names a method twice"),
    "a grader that is not there": (["rl_gsm8k", "--grader", "nowhere:grade", "--learning-rate", "1e-3"], "nowhere"),
    "a reference that is none": (["dpo", "--start-from", "data.jsonl"], "tinker:// path"),
    "a reference that is not there": (["dpo", "--start-from", "none.txt"], "'none.txt': No such file"),
    "a schedule that is none": (["sft_gsm8k", "--schedule", "steep"], "'steep'"),
    "a kind that is none": (["dpo", "--kind", "rlhf"], "kind is 'rlhf'"),
    "a renderer that is none": (["chat_sft", "--renderer", "latex"], "'latex'"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_flags(arguments, message, refused_recipe, base_url, tmp_path):
    (tmp_path / "data.jsonl").write_text((json.dumps(PAIR) + "\n") * 20, "utf-8")
    recipe, *flags = arguments
    if recipe in ("chat_sft", "sft_gsm8k", "inference_gsm8k"):
        flags += ["--data", "data.jsonl"]
    _, line = refused_recipe(recipe, *flags, "--base-url", base_url)
    assert message in line


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--steps", "many"], ["--rank", "-1"], ["--stpes", "3"]], ids=str)
def test_flags_that_typer_refuses(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(recipe_app(importlib.import_module("lorimer.recipes.sl_loop").main), flags)
    assert ended.exit_code == 2
    assert flags[0] in ended.stderr and "Traceback" not in ended.output


def test_wrong_key_and_wrong_address(refused_recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(transport, "FIRST_ANSWER_SECONDS", 1.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    code, line = refused_recipe("teach_its_name", "--base-url", nobody)
    assert code == 5
    assert line.startswith(f"lorimer: no server answers at {nobody} (") and "start one with `lorimer serve`" in line
    code, line = refused_recipe("teach_its_name", "--base-url", "localhost:8000")
    assert code == 2
    assert "http://" in line
    data = tmp_path / "data"
    create_key(data, "alice")
    monkeypatch.setenv("LORIMER_API_KEY", "tml-wrong")
    with running_server(data, ["lorimer/tiny"], start_engines="lazy") as server:
        code, line = refused_recipe("teach_its_name", "--base-url", server.url)
    assert code == 4
    assert "--api-key or LORIMER_API_KEY" in line


@pytest.mark.slow
def test_server_that_is_gone_for_good_is_told_and_left_by_ctrl_c(tmp_path):
    """It is waited for, as it may come back; whoever gives up gets no traceback and need not wait."""
    command = [sys.executable, "-m", "lorimer.recipes.sl_loop", "--steps", "100000", "--batch-size", "2"]
    with (tmp_path / "errors").open("w+") as errors:
        server = Process(tmp_path, "--model", "lorimer/tiny").wait_until_ready()
        try:
            recipe = subprocess.Popen(
                [*command, "--base-url", server.url],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            for line in recipe.stdout:
                if line.startswith(b"step 1/"):
                    break
        finally:
            server.close()  # SIGKILL
        deadline = time.monotonic() + 60
        while "trying again (Ctrl-C gives up)" not in (told := (tmp_path / "errors").read_text("utf-8")):
            assert recipe.poll() is None and time.monotonic() < deadline, told
            time.sleep(0.1)
        began = time.monotonic()
        recipe.send_signal(signal.SIGINT)
        recipe.communicate(timeout=60)
        assert recipe.returncode == 130
        assert time.monotonic() - began < 8
    told = (tmp_path / "errors").read_text("utf-8")
    assert "Traceback" not in told and told.count("cannot be reached") == 1, told


def test_traceback_is_there_for_whoever_wants_it(tmp_path):
    """In a process of its own, as people start it."""
    command = [sys.executable, "-m", "lorimer.recipes.eval_gsm8k", "--answers", "none.jsonl"]

    def run(**variables):
        ours = environment(**variables)
        return subprocess.run(command, env=ours, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    plain = run()
    assert (plain.returncode, plain.stderr) == (2, f"lorimer: 'none.jsonl' cannot be read: {os.strerror(2)}\n")
    assert "Traceback" in run(LORIMER_DEBUG="1").stderr
