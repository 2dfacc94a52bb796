"""Two steps of the recipes that learn from pairs and from teachers."""

import json

from lorimer.cookbook.logs import read_metrics


def test_dpo_on_a_file_and_on_made_pairs(run_recipe, service, tmp_path):
    data, output = tmp_path / "pairs.jsonl", tmp_path / "model.txt"
    rows = [{"instruction": f"Say {n}.", "input": "", "chosen": f"{n}", "rejected": f"no {n}"} for n in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = {"batch_size": 4, "num_held_out": 4, "max_steps": 2, "rank": 4, "output": output}
    printed = run_recipe("dpo", data=data, **options)
    reference = output.read_text("utf-8").strip()
    assert f"model: {reference}" in printed
    lines = read_metrics(tmp_path / "log")
    assert len(lines) == 3
    assert {"test/accuracy", "test/margin", "test/loss"} <= lines[-1].keys()
    run_recipe("dpo", kind="reward_model", beta=1, start_from=output, log_dir=tmp_path / "judge", **options)
    assert output.read_text("utf-8").strip() != reference


def test_distill_on_policy(run_recipe, tmp_path):
    options = {"teacher_steps": 2, "steps": 2, "batch_size": 2, "num_samples": 2, "rank": 4, "eval_every": 2}
    printed = run_recipe("distill_on_policy", num_questions=20, **options)
    assert "teacher" in printed
    lines = read_metrics(tmp_path / "log" / "student")
    assert len(lines) == 3
    assert lines[0]["test/reverse_kl"] != lines[2]["test/reverse_kl"]
    assert "reverse_kl" in lines[1]


def test_prompt_distillation(run_recipe, tmp_path):
    rules = tmp_path / "rules.txt"
    rules.write_text("Answer in a full sentence.", "utf-8")
    options = {"num_questions": 8, "num_held_out": 4, "batch_size": 4, "max_steps": 2, "rank": 4}
    printed = run_recipe("prompt_distillation", **options)
    assert "the teacher wrote" in printed
    assert read_metrics(tmp_path / "log")[-1]["test/nll"] > 0
    run_recipe("prompt_distillation", prompt_file=rules, top_k=0, log_dir=tmp_path / "hard", **options)
    assert len(read_metrics(tmp_path / "hard")) == 3
