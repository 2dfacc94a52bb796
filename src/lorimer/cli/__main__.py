"""``python -m lorimer.cli`` is the command ``lorimer``."""

from lorimer.cli import run

run()
