"""``docs/cli.md`` tells of the commands as they are."""

import cli_page


def test_page_is_current():
    assert cli_page.PAGE.read_text("utf-8") == cli_page.cli_page(), "python tools/cli_page.py"


def test_page_has_every_command_with_examples():
    import typer

    from lorimer.cli.main import app

    page = cli_page.cli_page()
    for path, command in cli_page.leaves(typer.main.get_command(app), "lorimer"):
        assert f"### `{path}" in page
        assert command.help, path
        assert f"$ {path}" in (command.epilog or ""), f"{path} has no example in its help"
        for param in command.params:
            assert param.help or "--help" in param.opts, f"{path}: {param.name} is not explained"
