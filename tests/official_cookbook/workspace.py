"""The directory in which recipes run: tokenizers and datasets under the names that the recipes ask a hub for.

``AutoTokenizer`` and ``load_dataset`` take a directory of the working directory before they think of a hub, so that
the recipes run unmodified and offline. All text is made here; its tasks are small enough for ``lorimer/tiny``.
"""

import json
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

STUDENT = "Qwen/Qwen3-8B-Base"
TEACHER = "Qwen/Qwen3-8B"
TRAIN_ROWS = 640
TEST_ROWS = 128
"""One batch of ``sl_basic``, which drops what does not fill one."""
BOXED = r"\boxed{%d}"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = " ".join(f"{number}) {letter}" for number, letter in enumerate("strawberry", 1))
EXAMPLE = (
    "How many r's are in strawberry?" + SUFFIX,
    f"Let's spell the word out and number all the letters: {SPELLED}. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}",
)
"""The example that recipes for problems put before a question."""
CHOICES = range(5)
"""The supervised data answer with any of these; problems want the last, so that one reply in five earns a reward."""
WANTED = CHOICES[-1]
Row = dict[str, Any]


def make_workspace(directory: Path, model: Path) -> None:
    """Fill ``directory``; ``model`` holds the files of the model that is served under the names above."""
    for name in (STUDENT, TEACHER):
        (directory / name).mkdir(parents=True)
        for file in model.iterdir():
            if file.is_file():
                shutil.copy(file, directory / name)
    chats = conversations(random.Random(1))
    write_dataset(directory / "HuggingFaceH4/no_robots", ({"messages": chat} for chat in chats))
    write_dataset(
        directory / "allenai/tulu-3-sft-mixture", ({"messages": chat} for chat in conversations(random.Random(2)))
    )
    write_dataset(directory / "Anthropic/hh-rlhf", comparisons(random.Random(3)))
    write_dataset(directory / "openai/gsm8k", problems(random.Random(4)), config="main")
    write_lines(directory / "boxed.jsonl", ({"messages": chat} for chat in boxed_replies(random.Random(5))))


def sums(random_: random.Random, below: int = 10) -> Iterator[tuple[str, int]]:
    while True:
        first, second = random_.randrange(below), random_.randrange(below)
        yield f"What is {first} + {second}?", first + second


def chat(question: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def conversations(random_: random.Random) -> Iterator[list[dict[str, str]]]:
    """Sums after the example that the recipe for arithmetic gives."""
    for question, total in sums(random_, below=101):
        yield chat("What is 4 + 5?", "9") + chat(question, str(total))


def comparisons(random_: random.Random) -> Iterator[Row]:
    """The right sum is preferred to another number."""
    for question, total in sums(random_):
        other = (total + random_.randrange(1, 10)) % 19
        replies = {"chosen": total, "rejected": other}
        yield {name: f"\n\nHuman: {question}\n\nAssistant: {reply}" for name, reply in replies.items()}


def problems(random_: random.Random) -> Iterator[Row]:
    while True:
        yield {"question": f"Ann has {random_.randrange(90)} coins. Which number?", "answer": f"So #### {WANTED}"}


def boxed_replies(random_: random.Random) -> Iterator[list[dict[str, str]]]:
    """The form that the recipes for problems want, with a number that is right by chance."""
    for row in problems(random_):
        yield chat(*EXAMPLE) + chat(row["question"] + SUFFIX, BOXED % random_.choice(CHOICES))


def write_dataset(directory: Path, rows: Iterator[Row], config: str = "default") -> None:
    """Two files and the page that names them as the splits of ``config``."""
    directory.mkdir(parents=True)
    splits = {"train": TRAIN_ROWS, "test": TEST_ROWS}
    for split, number in splits.items():
        write_lines(directory / f"{split}.jsonl", rows, number)
    page = [f"- config_name: {config}", "  data_files:"]
    for split in splits:
        page += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (directory / "README.md").write_text("\n".join(["---", "configs:", *page, "---", ""]), "utf-8")


def write_lines(file: Path, rows: Iterable[Row], number: int = TRAIN_ROWS) -> None:
    lines = (json.dumps(row) for row, _ in zip(rows, range(number), strict=False))
    file.write_text("".join(line + "\n" for line in lines), "utf-8")
