"""Tables fit the terminal, keep what is copied from them whole, and show text as it is."""

import pytest

from lorimer.cli.output import Column, fitted, print_facts, print_table, printable, size_text


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


def test_narrow_terminal(narrow, capsys):
    print_table([Column("id", whole=True), "text"], [["i" * 50, "t" * 50]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(line.split()[0] for line in lines[1:]).count("i") == 50
    assert "…" in lines[1]


@pytest.mark.parametrize(
    ("room", "widths"),
    [(200, [60, 10, 40]), (100, [50, 10, 40]), (60, [30, 10, 20]), (40, [20, 10, 10]), (20, [8, 6, 6]), (5, [6, 6, 6])],
)
def test_widths(room, widths):
    assert fitted([60, 10, 40], [True, False, False], room) == widths


def test_nothing_is_cut_in_a_pipe(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(["a", "b"], [["a" * 150, "b" * 150]])
    assert "a" * 150 + " " in capsys.readouterr().out


def test_markup_and_control_codes_have_no_effect(capsys):
    print_table(["text"], [["[red]a[/] :train: \x1b[31m\n"]])
    print_facts({"name": "[b]x\r", "list": ["one", "two\n"], "none": None, "empty": []})
    shown = capsys.readouterr().out
    assert "[red]a[/] :train: \\x1b[31m\\n" in shown
    assert "[b]x\\r" in shown and "two\\n" in shown
    assert "none" not in shown and "empty" not in shown


def test_sizes():
    assert [size_text(size) for size in (None, 0, 1500, 2_500_000_000)] == ["", "0 bytes", "1.5 kB", "2.5 GB"]


def test_printable_keeps_letters():
    assert printable("é漢 \u202e") == "é漢 \\u202e"
