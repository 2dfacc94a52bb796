"""Datasets: batches by the number of the step, so that a resumed run takes the same ones as an uninterrupted run.

Rows come from JSONL or JSON files, from Hugging Face datasets, from a function that makes them, or from an iterator.
Their order is a pure function of the seed and the epoch. What becomes of a row is the caller's ``convert``.
"""

import importlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lorimer import Datum
from lorimer.chat.conversation import Message, ToolSpec, TrainOn, check_messages
from lorimer.cookbook.datums import Reduction, conversation_to_datums
from lorimer.cookbook.renderers import Renderer
from lorimer.errors import InvalidInput

T = TypeVar("T")
Row = Mapping[str, Any]

FEW_STEPS = 20
"""Fewer than these teach little, and their number is worth a word."""


class Dataset(Protocol[T]):
    """Batches of a run, all its epochs included."""

    def get_batch(self, step: int) -> list[T]:
        """The batch of step number ``step``; the same whenever it is asked for."""

    def __len__(self) -> int:
        """The number of batches."""


class ShuffledDataset(Generic[T]):
    """Rows in a new order each epoch; the last batch of an epoch may be smaller."""

    def __init__(
        self,
        rows: Sequence[Any],
        batch_size: int,
        *,
        convert: Callable[[Any], Iterable[T]] | None = None,
        num_epochs: int = 1,
        seed: int = 0,
    ) -> None:
        """``convert`` gives the items of a row, none to leave it out; without it a row is its item."""
        if not len(rows):
            raise InvalidInput("the dataset has no rows; at least one is needed")
        if batch_size < 1 or num_epochs < 1:
            raise InvalidInput(f"batch_size is {batch_size} and num_epochs {num_epochs}; 1 or more is accepted")
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self._convert = convert or (lambda row: [row])
        self._per_epoch = -(-len(rows) // batch_size)
        self._num_epochs = num_epochs
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._per_epoch * self._num_epochs

    def length_advice(self, max_steps: int | None = None) -> str | None:
        """A sentence if the rows make few steps, or fewer than are wanted: how many, and which epochs give more."""
        wanted = FEW_STEPS if max_steps is None else max_steps
        if len(self) >= wanted:
            return None
        epochs = -(-wanted // self._per_epoch)
        of_epochs = f" in {self._num_epochs} epochs" if self._num_epochs > 1 else ""
        return (
            f"{counted(len(self._rows), 'example')}{of_epochs} {'are' if len(self._rows) > 1 else 'is'} "
            f"{counted(len(self), 'step')}; --epochs {epochs} gives {epochs * self._per_epoch}"
        )

    def get_batch(self, step: int) -> list[T]:
        epoch, index = divmod(step, self._per_epoch)
        chosen = self._order(epoch)[index * self._batch_size : (index + 1) * self._batch_size]
        batch = [item for row in chosen for item in self._convert(self._rows[int(row)])]
        if not batch:
            raise InvalidInput(f"no row of batch {step} gives an example; a larger max_length may be needed")
        return batch

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))}
        return self._orders[epoch]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class GeneratedDataset(Generic[T]):
    """Rows that a function makes; each gets a generator of its own, so that it depends on seed and index alone."""

    def __init__(
        self, make: Callable[[random.Random], Iterable[T]], batch_size: int, num_batches: int, *, seed: int = 0
    ) -> None:
        self._make, self._batch_size, self._num_batches, self._seed = make, batch_size, num_batches, seed

    def __len__(self) -> int:
        return self._num_batches

    def get_batch(self, step: int) -> list[T]:
        indices = range(step * self._batch_size, (step + 1) * self._batch_size)
        return [item for index in indices for item in self._make(random.Random(f"{self._seed} {index}"))]


class StreamedDataset(Generic[T]):
    """Rows of an iterator in its own order, which ``begin`` starts anew; a resumed run reads past what it has done."""

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        batch_size: int,
        num_batches: int,
        *,
        convert: Callable[[Any], Iterable[T]] | None = None,
    ) -> None:
        self._begin, self._batch_size, self._num_batches = begin, batch_size, num_batches
        self._convert = convert or (lambda row: [row])
        self._next = 0
        self._rows = begin()

    def __len__(self) -> int:
        return self._num_batches

    def get_batch(self, step: int) -> list[T]:
        if step < self._next:
            self._next, self._rows = 0, self._begin()
        skipped = (step - self._next) * self._batch_size
        rows = list(islice(self._rows, skipped, skipped + self._batch_size))
        self._next = step + 1
        if len(rows) < self._batch_size:
            raise InvalidInput(f"the stream ends within batch {step} of {self._num_batches}")
        return [item for row in rows for item in self._convert(row)]


def chat_dataset(
    rows: Sequence[Row],
    renderer: Renderer,
    *,
    batch_size: int,
    max_length: int | None = None,
    train_on: TrainOn = TrainOn.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
    num_epochs: int = 1,
    seed: int = 0,
) -> ShuffledDataset[Datum]:
    """Training examples of conversations; ``batch_size`` counts conversations."""
    convert = datum_maker(renderer, max_length=max_length, train_on=train_on, reduction=reduction)
    if len(rows):
        convert(rows[0])  # a wrong format is told before anything is computed
    return ShuffledDataset(rows, batch_size, convert=convert, num_epochs=num_epochs, seed=seed)


def datum_maker(
    renderer: Renderer,
    *,
    max_length: int | None = None,
    train_on: TrainOn = TrainOn.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> Callable[[Row], list[Datum]]:
    """A function from rows to examples."""

    def convert(row: Row) -> list[Datum]:
        messages, tools = read_conversation(row)
        return conversation_to_datums(messages, renderer, max_length, train_on, tools, reduction)

    return convert


_QUESTION_AND_ANSWER = [("prompt", "completion"), ("question", "answer"), ("instruction", "output")]


def read_conversation(row: Row) -> tuple[list[Message], list[ToolSpec] | None]:
    """The messages and tools of a row, which has ``messages``, or a question and its answer under one of three names.

    With ``instruction`` and ``output``, an ``input`` that is not empty follows the instruction.
    """
    if "messages" in row:
        if not isinstance(row["messages"], Sequence) or isinstance(row["messages"], str):
            raise InvalidInput(f"messages is {row['messages']!r}; a list of objects with role and content is accepted")
        messages: list[Message] = [_without_nulls(message) for message in row["messages"]]
        check_messages(messages)
        return messages, row.get("tools") or None
    for question, answer in _QUESTION_AND_ANSWER:
        if question in row and answer in row:
            asked = str(row[question])
            if question == "instruction" and row.get("input"):
                asked += f"\n\n{row['input']}"
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": str(row[answer])}], None
    raise InvalidInput(
        f"a row has the fields {sorted(row)}; accepted are messages, prompt and completion, question and answer, or "
        "instruction and output"
    )


def read_question(row: Row) -> list[Message]:
    """Return what is asked in a row: its messages up to the last answer, or its prompt, question or instruction."""
    for name in ("prompt", "question", "instruction"):
        if name in row and "messages" not in row:
            return read_conversation({"prompt": row[name], "completion": ""})[0][:-1]
    messages = read_conversation(row)[0]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InvalidInput("the messages hold answers alone; a question before them is needed")
    return messages


def _without_nulls(message: Any) -> Any:
    """A table has every field in every row; those without a value are not there."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}


MAX_HELD_OUT = 64


def default_held_out(num_rows: int, most: int = MAX_HELD_OUT) -> int:
    """A tenth of the rows, at least one and at most ``most``; none of a single row, which is needed for training."""
    return min(most, max(1, num_rows // 10), max(0, num_rows - 1))


def split_off(
    rows: Sequence[T], num_held_out: int | None = None, seed: int = 0, *, most: int = MAX_HELD_OUT
) -> tuple[list[T], list[T]]:
    """Rows to train on and ``num_held_out`` others to measure with, chosen by the seed.

    ``None`` holds out as many as ``default_held_out`` says.
    """
    if not len(rows):
        raise InvalidInput("the data has no rows; at least one is needed")
    if num_held_out is None:
        num_held_out = default_held_out(len(rows), most)
    if not 0 <= num_held_out < len(rows):
        raise InvalidInput(f"num_held_out is {num_held_out} and there are {len(rows)} rows; 0 to {len(rows) - 1} fit")
    order = np.random.default_rng([seed]).permutation(len(rows))
    held_out = set(order[:num_held_out].tolist())
    kept = [row for index, row in enumerate(rows) if index not in held_out]
    return kept, [row for index, row in enumerate(rows) if index in held_out]


# ── files and Hugging Face datasets ───────────────────────────────────────────────────────────────────


def load_rows(source: str | Path, *, split: str = "train", limit: int | None = None) -> Sequence[Row]:
    """The rows of a ``.jsonl`` or ``.json`` file, or of a Hugging Face dataset, a directory or ``name:config``."""
    path = Path(source)
    if path.suffix == ".jsonl":
        return read_jsonl_rows(path)[:limit]
    if path.suffix == ".json":
        try:
            rows: Any = json.loads(_read(path))
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{str(path)!r} is no JSON: {error}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InvalidInput(f"{str(path)!r} is no list of objects, which is what is accepted")
        return checked_rows(rows, path)[:limit]
    dataset: Sequence[Row] = _load_hugging_face(str(source), split, limit)
    return dataset


def read_jsonl_rows(path: Path | str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_read(Path(path)).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInput(f"line {number} of {str(path)!r} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise InvalidInput(f"line {number} of {str(path)!r} is {row!r}; an object is accepted")
        rows.append(row)
    return checked_rows(rows, path)


def check_conversations(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows, of which each is a conversation; of a table that is read from disk only the first one is looked at."""
    convert_rows(rows if isinstance(rows, list) else [rows[0]] if len(rows) else [], read_conversation)
    return rows


def convert_rows(rows: Iterable[Row], convert: Callable[[Row], T]) -> list[T]:
    """Return what ``convert`` makes of each row; an error names the row."""
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(convert(row))
        except InvalidInput as error:
            raise type(error)(f"row {number} of the data: {error}") from None
    return found


def check_fields(rows: Sequence[Row], *names: str) -> Sequence[Row]:
    """The rows, of which each has these fields."""
    for number, row in enumerate(rows, 1):
        if missing := [name for name in names if row.get(name) is None]:
            raise InvalidInput(
                f"row {number} of the data has the fields {sorted(row)}, but no {' and no '.join(missing)}"
            )
    return rows


def checked_rows(rows: list[dict[str, Any]], path: Path | str) -> list[dict[str, Any]]:
    if not rows:
        raise InvalidInput(f"{str(path)!r} is empty; at least one row is needed")
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{str(path)!r} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def _load_hugging_face(source: str, split: str, limit: int | None) -> Any:
    datasets = _datasets_package(source)
    if (Path(source) / "state.json").is_file() or (Path(source) / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(source)
        dataset = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    else:
        name, _, config = source.partition(":")
        try:
            dataset = datasets.load_dataset(name, config or None, split=split)
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            raise InvalidInput(f"the dataset {source!r} with split {split!r} cannot be loaded: {error}") from error
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def _datasets_package(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise InvalidInput(
            f"{source!r} is no .jsonl or .json file, and to load it as a Hugging Face dataset the package datasets is "
            "needed: pip install datasets"
        ) from None
