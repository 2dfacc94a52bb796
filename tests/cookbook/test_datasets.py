"""Batches by number, rows from files and datasets, conversations from rows."""

import json
from itertools import chain, count

import pytest

from lorimer.cookbook.datasets import (
    GeneratedDataset,
    ShuffledDataset,
    StreamedDataset,
    chat_dataset,
    load_rows,
    read_conversation,
    split_off,
)
from lorimer.cookbook.renderers import TemplateRenderer
from lorimer.errors import InvalidInput
from tests.cookbook.chat_templates import tokenizer_with


def all_batches(dataset):
    return [dataset.get_batch(step) for step in range(len(dataset))]


def test_every_epoch_has_every_row_in_an_order_of_its_own():
    dataset = ShuffledDataset(range(10), 4, num_epochs=3, seed=5)
    assert len(dataset) == 9
    batches = all_batches(dataset)
    epochs = [list(chain.from_iterable(batches[i : i + 3])) for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_are_the_same_in_whatever_order_they_are_asked_for():
    first, second = (ShuffledDataset(range(10), 4, num_epochs=3, seed=5) for _ in range(2))
    assert [second.get_batch(step) for step in reversed(range(9))][::-1] == all_batches(first)
    assert all_batches(ShuffledDataset(range(10), 4, num_epochs=3, seed=6)) != all_batches(first)


def test_rows_may_become_several_items_or_none():
    dataset = ShuffledDataset(range(4), 4, convert=lambda row: [row] * row)
    assert sorted(dataset.get_batch(0)) == [1, 2, 2, 3, 3, 3]
    with pytest.raises(InvalidInput, match="no row of batch 0 gives an example"):
        ShuffledDataset(range(4), 4, convert=lambda row: []).get_batch(0)


@pytest.mark.parametrize(("rows", "size", "epochs"), [([], 1, 1), ([1], 0, 1), ([1], 1, 0)])
def test_empty_datasets_are_refused(rows, size, epochs):
    with pytest.raises(InvalidInput):
        ShuffledDataset(rows, size, num_epochs=epochs)


def test_generated_rows_depend_on_seed_and_index_alone():
    def make(rng):
        yield [rng.random() for _ in range(rng.randint(1, 3))]

    small, large = GeneratedDataset(make, 2, 6, seed=1), GeneratedDataset(make, 4, 3, seed=1)
    assert [*chain.from_iterable(all_batches(small))] == [*chain.from_iterable(all_batches(large))]
    assert small.get_batch(4) == all_batches(small)[4]
    assert GeneratedDataset(make, 2, 6, seed=2).get_batch(0) != small.get_batch(0)


def test_streams_are_read_on_and_read_again():
    dataset = StreamedDataset(count, 3, 4, convert=lambda row: [row * 10])
    assert dataset.get_batch(1) == [30, 40, 50]
    assert dataset.get_batch(3) == [90, 100, 110]
    assert dataset.get_batch(0) == [0, 10, 20]
    with pytest.raises(InvalidInput, match="ends within batch 1 of 2"):
        StreamedDataset(lambda: iter(range(5)), 3, 2).get_batch(1)


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 0), (2, 1), (9, 1), (30, 3), (640, 64), (5000, 64)])
def test_a_tenth_is_held_out_where_nothing_is_said(num_rows, expected):
    kept, held_out = split_off(range(num_rows))
    assert (len(kept), len(held_out)) == (num_rows - expected, expected)


def test_number_of_steps_is_told_where_it_is_small():
    rows = list(range(26))
    assert ShuffledDataset(rows, 32).length_advice() == "26 examples are 1 step; --epochs 20 gives 20"
    assert ShuffledDataset(rows, 8).length_advice() == "26 examples are 4 steps; --epochs 5 gives 20"
    assert ShuffledDataset(rows, 8, num_epochs=3).length_advice(100) == (
        "26 examples in 3 epochs are 12 steps; --epochs 25 gives 100"
    )
    assert ShuffledDataset(rows, 1).length_advice() is None
    assert ShuffledDataset(rows, 8).length_advice(max_steps=4) is None


def test_rows_are_held_out_by_the_seed():
    kept, held_out = split_off(range(20), 5, seed=3)
    assert (len(kept), len(held_out)) == (15, 5)
    assert sorted(kept + held_out) == list(range(20))
    assert split_off(range(20), 5, seed=3) == (kept, held_out)
    assert split_off(range(20), 5, seed=4)[1] != held_out
    with pytest.raises(InvalidInput, match="num_held_out is 20 and there are 20 rows; 0 to 19 fit"):
        split_off(range(20), 20)


CONVERSATIONS = {
    "messages": {"messages": [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a"}]},
    "prompt": {"prompt": "q", "completion": "a"},
    "question": {"question": "q", "answer": "a"},
    "instruction": {"instruction": "q", "input": "", "output": "a"},
}


@pytest.mark.parametrize("row", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations_of_rows(row):
    assert read_conversation(row) == (
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        None,
    )


def test_instruction_with_input_and_a_row_that_is_no_conversation():
    messages, _ = read_conversation({"instruction": "Add.", "input": "2 3", "output": "5"})
    assert messages[0]["content"] == "Add.\n\n2 3"
    with pytest.raises(InvalidInput, match=r"a row has the fields \['text'\]"):
        read_conversation({"text": "q"})


def test_rows_of_files(tmp_path):
    lines, whole = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text('{"a": 1}\n\n{"a": 2}\n', "utf-8")
    whole.write_text('[{"a": 1}, {"a": 2}]', "utf-8")
    assert load_rows(lines) == load_rows(whole) == [{"a": 1}, {"a": 2}]
    assert load_rows(lines, limit=1) == [{"a": 1}]


WRONG_FILES = {
    "a.jsonl": ('{"a": 1}\n{"a"', "line 2 of .* is no JSON"),
    "b.jsonl": ("[1]", r"line 1 of .* is \[1\]; an object is accepted"),
    "c.json": ("{}", "is no list of objects"),
}


@pytest.mark.parametrize(("name", "text", "reason"), [(n, *rest) for n, rest in WRONG_FILES.items()])
def test_files_that_cannot_be_read(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(InvalidInput, match=reason):
        load_rows(tmp_path / name)
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        load_rows(tmp_path / "none.jsonl")


def test_hugging_face_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(3)]
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(tmp_path / "saved")
    loaded = load_rows(tmp_path / "saved", limit=2)
    assert [dict(row) for row in loaded] == rows[:2]
    assert read_conversation(loaded[0])[0][0]["content"] == "q0"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert [dict(row) for row in load_rows(str(tmp_path / "files"))] == rows
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        load_rows(str(tmp_path / "files"), split="test")


def test_chat_dataset_tells_a_wrong_format_at_once():
    renderer = TemplateRenderer(tokenizer_with())
    rows = [{"question": "What is 2 + 3?", "answer": "5"}] * 3
    batches = all_batches(chat_dataset(rows, renderer, batch_size=2))
    assert [len(batch) for batch in batches] == [2, 1]
    assert renderer.tokenizer.decode(batches[0][0].model_input.to_ints()).endswith("assistant\n5")
    with pytest.raises(InvalidInput, match="a row has the fields"):
        chat_dataset([{"text": "a"}], renderer, batch_size=2)
