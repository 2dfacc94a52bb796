"""How commands find their server, and what they say when there is none."""

import asyncio
import json
import socket
import subprocess
import sys

import pytest

from lorimer.server.app import running
from lorimer.server.settings import Settings
from tests.cli.commands import lorimer, refused
from tests.conformance.servers import LORIMER, environment


def free_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_server_that_is_not_there_is_one_line_and_exit_code_5():
    url = free_url()
    for run in (lorimer("run", "list", "--base-url", url), lorimer("usage", TINKER_BASE_URL=url)):
        code, line = refused(run)
        assert code == 5
        assert url in line and "lorimer serve" in line


def test_other_kinds_of_servers_are_told_apart(server, alice):
    code, line = refused(lorimer("run", "list", "--url", f"{server.url}/console"))
    assert (code, "answers 200 with text/html" in line) == (5, True)
    code, line = refused(lorimer("run", "list", "--url", f"{server.url}/elsewhere"))
    assert (code, "answers 401" in line) == (5, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "ftp://a"], "accepted are http:// and https://"),
        (["--base-url", "http://a", "--data", "b"], "one of them is accepted"),
    ],
)
def test_wrong_options(options, message):
    code, line = refused(lorimer("run", "list", *options))
    assert (code, message in line) == (2, True)


def test_no_server_and_no_data(tmp_path):
    code, line = refused(lorimer("run", "list", "--data", tmp_path / "none"))
    assert (code, "has no data yet" in line) == (5, True)
    assert not (tmp_path / "none").exists()
    assert refused(lorimer("run", "list", LORIMER_DATA=str(tmp_path / "none")))[0] == 5


def test_key_is_missing_or_wrong(server, alice):
    for options in ([], ["--api-key", "tml-wrong"]):
        code, line = refused(lorimer("run", "list", "--base-url", server.url, *options))
        assert code == 4
        assert "--api-key or LORIMER_API_KEY" in line


def test_options_go_before_the_environment(alice, bob, trained):
    run = lorimer("run", "list", "--base-url", alice.url, "--api-key", bob.key, LORIMER_API_KEY=alice.key)
    assert (run.exit_code, run.stderr) == (0, "no runs\n")
    run = alice.run("run", "list", "--data", "/nowhere")
    assert run.exit_code == 5


def test_data_directory_of_a_running_server_leads_to_it(server, alice, trained):
    run = lorimer("run", "list", "--data", server.data, "--api-key", alice.key, "-f", "json")
    assert run.exit_code == 0, run.stderr
    assert trained.run_id in [one["training_run_id"] for one in json.loads(run.stdout)["runs"]]
    assert run.stderr == f"lorimer: asking the server at {server.url}, which has {server.data}\n"


async def test_directory_of_a_program_without_an_address_is_exit_code_3(tmp_path):
    async with running(Settings(data=tmp_path / "data", start_engines="lazy")):
        run = await asyncio.to_thread(lorimer, "run", "list", "--data", tmp_path / "data")
    code, line = refused(run)
    assert code == 3
    assert "is in use by process" in line and "no address" in line


@pytest.mark.service
def test_without_a_server_the_command_is_one(tmp_path):
    """In processes of their own, as each is a whole server."""
    program = (
        "import lorimer\n"
        "with lorimer.ServiceClient(base_url='local', display_name='Embedded') as service:\n"
        "    print(service.holder.session_id)\n"
    )
    variables = environment(
        LORIMER_DATA=str(tmp_path / "data"), LORIMER_START_ENGINES="lazy", LORIMER_MODELS="lorimer/debug"
    )

    def run(*command):
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    session_id = run(sys.executable, "-c", program).stdout.strip()
    listed = run(*LORIMER, "session", "list", "-f", "json")
    assert (listed.returncode, listed.stderr) == (0, "")
    (found,) = json.loads(listed.stdout)["sessions"]
    assert (found["session_id"], found["display_name"]) == (session_id, "Embedded")
    traced = run(*LORIMER, "session", "export-trace", session_id)
    assert (traced.returncode, traced.stdout) == (0, f"{session_id}.json\n"), traced.stderr
    assert "traceEvents" in json.loads((tmp_path / f"{session_id}.json").read_text("utf-8"))
