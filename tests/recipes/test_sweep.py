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
