"""Charts from log directories: what is drawn, in which order, and that a page cannot be made to do anything else."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from lorimer.cookbook.logs import JsonlSink
from lorimer.cookbook.plots import Chart, draw_png, read_charts, smoothed, write_html
from lorimer.errors import InvalidInput


def make_run(directory, values, **more):
    directory.mkdir(parents=True)
    log = JsonlSink(directory / "metrics.jsonl", 0)
    for step, value in enumerate(values):
        log.log({"time/total": 1.0, "odd": float("nan"), "train/nll": value, **more}, step)
    log.log({"test/reward/total": 0.5}, len(values))
    log.close()
    return directory


def test_a_chart_has_a_line_for_each_run_that_has_the_metric(tmp_path):
    first = make_run(tmp_path / "a" / "run", [3.0, 2.0])
    second = make_run(tmp_path / "b" / "run", [4.0], extra=7)
    charts = {chart.metric: chart.lines for chart in read_charts([first, second])}
    assert list(charts) == ["test/reward/total", "train/nll", "extra"]
    assert charts["train/nll"] == {"a/run": [(0, 3.0), (1, 2.0)], "b/run": [(0, 4.0)]}
    assert charts["extra"] == {"b/run": [(0, 7)]}


def test_patterns_choose_metrics(tmp_path):
    run = make_run(tmp_path / "run", [1.0])
    assert [chart.metric for chart in read_charts([run], ["time/*"])] == ["time/total"]
    with pytest.raises(InvalidInput, match=r"no metric matches reward\*; there are time/total, train/nll"):
        read_charts([run], ["reward*"])


def test_a_directory_without_metrics_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"has no metrics\.jsonl"):
        read_charts([tmp_path])
    run = make_run(tmp_path / "run", [1.0])
    with pytest.raises(InvalidInput, match="given twice"):
        read_charts([run, run])


def test_smoothing_is_a_moving_average_without_bias():
    line = [(0, 4.0), (1, 8.0), (2, 8.0)]
    assert smoothed(line, 0.0) == line
    assert [value for _, value in smoothed(line, 0.5)] == pytest.approx([4.0, 20 / 3, 52 / 7])
    with pytest.raises(InvalidInput, match="less than 1"):
        smoothed(line, 1.0)


def test_a_page_holds_the_points_and_escapes_names(tmp_path):
    run = make_run(tmp_path / "<img src=x>", [3.0, 2.5], **{"<script>alert(1)</script>": 1})
    page = write_html(read_charts([run]), tmp_path / "curves.html", smoothing=0.5, title="<b>").read_text("utf-8")
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    svg = re.search(r"<figcaption>train/nll</figcaption>(<svg.*?</svg>)", page)[1]
    drawn = ElementTree.fromstring(svg)
    assert [title.text for title in drawn.iter("title")] == [
        "<img src=x>, step 0: 3",
        "<img src=x>, step 1: 2.5",
    ]
    assert len(list(drawn.iter("polyline"))) == 2


def test_a_picture_is_drawn(tmp_path):
    run = make_run(tmp_path / "run", [3.0, 2.5, 2.0, 1.0])
    other = make_run(tmp_path / "other", [2.0])
    picture = draw_png(read_charts([run, other]), tmp_path / "out" / "curves.png", smoothing=0.3, title="two runs")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000


def test_the_command_writes_both_files(tmp_path):
    from lorimer.cli.main import app

    run = make_run(tmp_path / "run", [3.0, 2.5])
    done = CliRunner().invoke(app, ["plot", str(run), "--smooth", "0.5", "-f", "json"])
    assert done.exit_code == 0, done.output
    assert (run / "curves.png").exists()
    assert (run / "curves.html").exists()
    failed = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert failed.exit_code == 2
    assert "metrics.jsonl" in failed.output


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances(tmp_path):
    points = [(1e-4, 3.0), (1e-3, 2.0), (1e-2, 4.0)]
    chart = Chart("nll", {"a": points}, x_label="learning rate", is_log_x=True)
    page = write_html([chart], tmp_path / "rates.html").read_text("utf-8")
    places = [float(found) for found in re.findall(r'<circle cx="([\d.]+)"', page)]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.11)
    assert "a, learning rate 0.001: 2" in page
    assert ">0.0001<" in page and ">0.01<" in page, "its marks are rates"
    assert draw_png([chart], tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
