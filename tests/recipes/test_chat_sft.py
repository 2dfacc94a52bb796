"""Fine-tuning on conversations of a file, and of a Hugging Face dataset."""

import json

import pytest

from lorimer.cookbook.logs import read_metrics

OPTIONS = {"max_steps": 2, "batch_size": 2, "rank": 4, "num_held_out": 2}


def conversation(number):
    return {
        "messages": [
            {"role": "user", "content": f"Count to {number}."},
            {"role": "assistant", "content": " ".join(map(str, range(1, number + 1)))},
            {"role": "user", "content": "Thank you."},
            {"role": "assistant", "content": "Gladly."},
        ]
    }


def test_two_steps_on_a_file(run_recipe, tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(conversation(n)) + "\n" for n in range(2, 10)), "utf-8")
    printed = run_recipe("chat_sft", data=data, **OPTIONS)
    assert "learning rate 0.00428: 5e-05 of full fine-tuning, times 10 for LoRA" in printed
    assert [line["step"] for line in read_metrics(tmp_path / "log")] == [0, 1, 2]
    assert "test/nll" in read_metrics(tmp_path / "log")[-1]
    assert "checkpoint: tinker://" in printed


def test_thirty_conversations_are_enough(run_recipe, tmp_path):
    """A tenth is held out, and it says how many steps the rest makes."""
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(conversation(n)) + "\n" for n in range(2, 32)), "utf-8")
    printed = run_recipe("chat_sft", data=data, rank=4)
    assert "27 examples are 1 step; --epochs 20 gives 20\n" in printed
    assert "held-out nll " in printed
    single = tmp_path / "one.jsonl"
    single.write_text(json.dumps(conversation(3)), "utf-8")
    printed = run_recipe("chat_sft", data=single, rank=4, log_dir=tmp_path / "one", max_steps=5)
    assert "1 example is 1 step; --epochs 5 gives 5\n" in printed
    assert "held-out" not in printed and "nan" not in printed


def test_two_steps_on_a_hugging_face_dataset(run_recipe, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([conversation(n) for n in range(2, 10)]).save_to_disk(tmp_path / "chats")
    run_recipe("chat_sft", data=tmp_path / "chats", train_on="last_assistant_message", **OPTIONS)
    assert len(read_metrics(tmp_path / "log")) == 3
