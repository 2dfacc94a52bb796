"""Fine-tuning on word problems: the reference of the model is printed and written."""

import json

from lorimer.cookbook.logs import read_metrics


def problem(n):
    return {
        "question": f"Ida has {n} pens and buys {n} more. How many?",
        "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}",
    }


def test_two_steps(run_recipe, service, tmp_path):
    data, output = tmp_path / "train.jsonl", tmp_path / "model.txt"
    data.write_text("".join(json.dumps(problem(n)) + "\n" for n in range(12)), "utf-8")
    options = {"data": data, "output": output, "batch_size": 4, "num_held_out": 4, "max_steps": 2, "rank": 4}
    printed = run_recipe("sft_gsm8k", schedule="cosine", **options)
    reference = output.read_text("utf-8").strip()
    assert f"model: {reference}" in printed
    assert read_metrics(tmp_path / "log")[-1]["test/nll"] > 0
    assert service.create_sampling_client(reference).get_base_model() == "lorimer/tiny"
