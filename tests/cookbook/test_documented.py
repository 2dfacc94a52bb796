"""The examples of the cookbook's page, one after another as they stand."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_examples_run(base_url, tmp_path, monkeypatch):
    monkeypatch.setenv("LORIMER_BASE_URL", base_url)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text("utf-8")
    names: dict[str, object] = {}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    assert "result" in names
