"""Where the data of tasks are: a file that is given, or one in the cache. Nothing is ever downloaded here."""

from pathlib import Path

from lorimer.client.tokenizers import cache_directory
from lorimer.cookbook.datasets import Row, load_rows
from lorimer.errors import InvalidInput

SOURCES = {
    "gsm8k": ("gsm8k/test.jsonl", "github.com/openai/grade-school-math (grade_school_math/data/test.jsonl)"),
    "svamp": ("svamp/SVAMP.json", "github.com/arkilpatel/SVAMP (SVAMP.json)"),
    "mt_bench": (
        "mt_bench/question.jsonl",
        "github.com/lm-sys/FastChat (fastchat/llm_judge/data/mt_bench/question.jsonl)",
    ),
}
"""For each task its place in the cache, and where the file can be had."""


def cache_dir(name: str) -> Path:
    """Return a folder of the user's cache, beside that of tokenizers: below ``XDG_CACHE_HOME``, else ``~/.cache``."""
    return cache_directory().parent / name


def read_task_rows(task: str, data: str | None) -> list[Row]:
    """Return the rows of a task from ``data``, a .jsonl or .json file, else from the cache."""
    path = None if data is None else Path(data).expanduser()
    if path is None:
        if task not in SOURCES:
            raise InvalidInput(f"the task {task!r} needs data: a .jsonl or .json file (--data)")
        place, source = SOURCES[task]
        path = cache_dir("data") / place
        if not path.is_file():
            raise InvalidInput(
                f"the data of {task} are not in {str(path)!r}; get the file from {source} and put it there, or name it "
                "with --data"
            )
    if path.suffix not in (".jsonl", ".json"):
        raise InvalidInput(f"the data are {str(path)!r}; a .jsonl or .json file is accepted")
    return list(load_rows(path))
