"""The demo runs to its end on the bundled model and shows what it promises."""

import pytest

from lorimer.engine import demo
from lorimer.errors import LorimerError


def test_the_demo_trains_and_shows_before_and_after(capsys, monkeypatch):
    monkeypatch.setattr(demo, "NUM_QUESTIONS", 16)
    demo.main(["--steps", "3"])
    text = capsys.readouterr().out
    assert "lorimer/tiny" in text
    assert "3/3" in text
    assert "loss per answer token" in text
    assert "of 16" in text


def test_a_model_that_is_not_there_is_explained():
    with pytest.raises(LorimerError, match="no-such-alias"):
        demo.main(["--model", "no-such-alias"])
