"""The command line. Commands load what they need when they run, so that ``lorimer --help`` is quick."""

INTERRUPTED = 130


def run() -> None:
    """Run the command ``lorimer``. Ctrl-C ends it without a traceback also while its modules are loaded."""
    try:
        from lorimer.cli.main import app
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    app()
