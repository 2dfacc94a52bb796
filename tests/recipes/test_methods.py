"""Methods on the same data: a search of each learning rate, a final run of each, a table, a CSV file and a plot."""

import csv
import json

from lorimer.cookbook.logs import read_metrics

TINY = {"steps": 2, "search_steps": 1, "batch_size": 2, "num_held_out": 4, "eval_every": 1}


def test_two_steps_of_an_adapter_and_of_all_weights(run_recipe, service, tmp_path):
    log = tmp_path / "log"
    printed = run_recipe("methods", methods="loraplus-2,full-muon@1e-4", max_rates=1, **TINY)
    with (log / "methods.csv").open(encoding="utf-8") as file:
        plus, full = csv.DictReader(file)
    assert (plus["method"], full["method"], float(full["learning_rate"])) == ("loraplus-2", "full-muon", 1e-4)
    assert int(full["trained_parameters"]) == 918_912
    assert int(plus["trained_parameters"]) == int(plus["optimizer_state_bytes"]) // 8, "two moments in float32"
    assert int(full["optimizer_state_bytes"]) < 8 * 918_912, "Muon keeps one moment of a matrix"
    assert plus["num_tokens"] == full["num_tokens"]
    for row in (plus, full):
        assert float(row["best_nll"]) <= float(row["final_nll"])
        assert int(row["engine_bytes"]) > 100 << 20
        assert f"{row['method']}: held-out nll {float(row['final_nll']):.4f}, tinker://" in printed
        assert [line["step"] for line in read_metrics(log / row["method"])] == [0, 1, 2]
    assert (log / "methods.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((log / "loraplus-2" / "config.json").read_text("utf-8"))
    assert config["optimizer_params"] == {"lr_multipliers": {"lora_B": 16.0}}
    again = run_recipe("methods", methods="loraplus-2,full-muon@1e-4", max_rates=1, **TINY)
    assert again.count("nothing is trained") == 2
    assert again.splitlines()[-1] == printed.splitlines()[-1]


def test_the_search_deletes_what_it_saved_and_the_final_run_has_the_best_rate(run_recipe, service, tmp_path):
    run_recipe("methods", methods="lora-2", max_rates=4, **TINY)
    searched = sorted((tmp_path / "log" / "search").iterdir())
    found = {float(path.name.partition("=")[2]): read_metrics(path)[-1]["test/nll"] for path in searched}
    assert len(found) in (3, 4)
    config = json.loads((tmp_path / "log" / "lora-2" / "config.json").read_text("utf-8"))
    assert f"{config['learning_rate']:.3g}" == f"{min(found, key=found.get):.3g}"
    paths = {
        kind: json.loads((directory / "checkpoints.jsonl").read_text("utf-8").splitlines()[-1])["sampler_path"]
        for kind, directory in (
            ("final", tmp_path / "log" / "lora-2"),
            ("search", searched[0]),
        )
    }
    rest = service.create_rest_client()
    left = [checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints(limit=1000).result().checkpoints]
    assert paths["final"] in left and paths["search"] not in left
