"""Several concurrent runs: a directory for each, a table and a plot."""

from lorimer.cookbook.logs import read_metrics


def test_two_steps_of_four_runs(run_recipe, tmp_path):
    printed = run_recipe("sweep", learning_rates="1e-3,1e-2", ranks="2,4", steps=2, batch_size=4, num_questions=4)
    for rate in ("0.001", "0.01"):
        for rank in (2, 4):
            assert f"learning rate {rate}, rank {rank}: done" in printed
            lines = read_metrics(tmp_path / "log" / f"learning_rate={rate},rank={rank}")
            assert [line["step"] for line in lines] == [0, 1, 2]
    assert "best: tinker://" in printed
    assert (tmp_path / "log" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_every_run_is_on_the_server_with_its_name_tag_configuration_metrics_and_end(run_recipe, service):
    rate = "0.00123"
    run_recipe("sweep", learning_rates=rate, ranks="2,4", steps=2, batch_size=4, num_questions=4)
    rest = service.create_rest_client()
    found = rest.list_runs(f"tag=sweep config.learning_rate={rate}", sort="config.rank").result()
    assert [run.name for run in found.runs] == [f"learning_rate={rate},rank={rank}" for rank in (2, 4)]
    for run, rank in zip(found.runs, (2, 4), strict=True):
        assert (run.status, run.steps_done, run.num_steps, run.tags) == ("finished", 2, 2, ["sweep"])
        details = rest.get_run(run.run_id).result()
        expected = {"learning_rate": float(rate), "rank": rank, "seed": 0, "batch_size": 4, "num_questions": 4}
        assert expected.items() <= details.config.items()
        assert {"train/nll", "test/nll", "test/accuracy"} <= {one.name for one in details.metrics}
