"""The metrics page of a run: sections that fold, pins, copies and constants; full screen, exports, marks and clicks."""

import csv
import io
import itertools
import re
import secrets
import xml.etree.ElementTree as ET

import httpx2
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

import lorimer
from tests.console.conftest import SECONDS
from tests.console.test_run import chart, wait_for_points

NUM_STEPS = 8
KEY = secrets.token_hex(8)


def train_rl(client: lorimer.TrainingClient, first: int, last: int) -> None:
    """Real steps, reported as the cookbook's RL loop does: with the engine's numbers, and constants."""
    tokens = client.get_tokenizer().encode("My favourite colour is green, of course.")
    datum = lorimer.Datum(lorimer.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    for step in range(first, last):
        client.forward_backward([datum], "cross_entropy")
        done = client.optim_step(lorimer.AdamParams(learning_rate=2e-3)).result()
        norms = {f"optim/{name}": value for name, value in done.metrics.items()}
        own = {"env/all/reward/total": step / 10, "env/all/correct": step / 20, "time/total": 1.5 + step % 3}
        own |= {"optim/lr": 2e-3, "loss:sum": 7.0 + step}
        client.log_metrics(own | norms, step=step).result()


@pytest.fixture(scope="module")
def rl(server, trainer) -> lorimer.TrainingClient:
    """Resumed once, with a checkpoint there and one at the end."""
    first = trainer.run(server.url, run={"run_key": KEY, "name": "sections"})
    trainer.do(train_rl, first, 0, 5)
    path = trainer.do(lambda: first.save_state("five").result()).path

    def resume() -> lorimer.TrainingClient:
        service = lorimer.ServiceClient(base_url=server.url, api_key="tml-local")
        return service.create_training_client_from_state_with_optimizer(path, run_key=KEY, first_step=5)

    second = trainer.do(resume)
    trainer.do(train_rl, second, 5, NUM_STEPS)
    trainer.do(lambda: second.save_state("end").result())
    return first


def names(page: Page) -> list[str]:
    found: list[str] = page.locator(".chart").evaluate_all("nodes => nodes.map((one) => one.dataset.metric)")
    return found


def section(page: Page, name: str):
    return page.locator(f".chart-section[data-section='{name}']")


def test_the_reward_is_first_and_sections_fold_and_are_remembered(server, open_page, rl):
    page = open_page(server.url, f"/console/runs/{rl.model_id}")
    wait_for_points(page, "env/all/reward/total", NUM_STEPS)
    assert names(page)[0] == "env/all/reward/total"
    order = page.locator(".chart-section").evaluate_all("nodes => nodes.map((one) => one.dataset.section)")
    assert order == ["env", "general", "optim", "time", "constants"]
    assert page.locator(".chart").count() == len(set(names(page)))
    section(page, "env").locator("summary").first.click()
    expect(chart(page, "env/all/reward/total")).to_be_hidden()
    expect(page).to_have_url(re.compile(r"fold=.*env"))
    page.goto(f"/console/runs/{rl.model_id}")  # without the choice in the address
    expect(chart(page, "time/total")).to_be_visible()
    expect(chart(page, "env/all/reward/total")).to_be_hidden()
    page.goto(f"/console/runs/{rl.model_id}?fold=time")  # the address is stronger
    expect(chart(page, "env/all/reward/total")).to_be_visible()
    expect(chart(page, "time/total")).to_be_hidden()


def test_pinned_charts_are_on_top_and_stay_there(server, open_page, rl):
    page = open_page(server.url, f"/console/runs/{rl.model_id}")
    chart(page, "time/total").get_by_role("button", name="Pin to the top").click()
    expect(section(page, "pinned").locator(".chart")).to_have_attribute("data-metric", "time/total")
    expect(section(page, "time")).to_have_count(0)
    assert names(page)[0] == "time/total"
    expect(page).to_have_url(re.compile(r"pin=time"))
    page.goto(f"/console/runs/{rl.model_id}")
    expect(section(page, "pinned").locator(".chart")).to_have_count(1)
    chart(page, "time/total").get_by_role("button", name="Unpin").click()
    expect(section(page, "pinned")).to_have_count(0)
    expect(section(page, "time").locator(".chart")).to_have_count(1)


def test_copies_are_drawn_once_and_differences_are_told(server, open_page, rl):
    page = open_page(server.url, f"/console/runs/{rl.model_id}")
    wait_for_points(page, "optim/grad_norm", NUM_STEPS)
    expect(chart(page, "grad_norm")).to_have_count(0)
    expect(chart(page, "optim/grad_norm")).to_contain_text("client = engine")
    expect(chart(page, "optim/grad_norm")).to_have_attribute("data-points", str(NUM_STEPS))
    expect(chart(page, "loss:sum")).to_contain_text("client ≠ engine")
    expect(chart(page, "loss:sum")).to_have_attribute("data-points", f"{NUM_STEPS} {NUM_STEPS}")


def test_constants_are_in_one_table_with_their_value(server, open_page, rl):
    page = open_page(server.url, f"/console/runs/{rl.model_id}")
    expect(section(page, "time")).to_be_visible()
    expect(chart(page, "optim/lr")).to_have_count(0)
    row = page.locator("[data-constant='optim/lr']")
    expect(row).to_be_hidden()
    section(page, "constants").locator("summary").first.click()
    expect(row).to_contain_text("0.002")
    page.get_by_label("constants").check()
    expect(chart(page, "optim/lr")).to_be_visible()
    expect(page).to_have_url(re.compile(r"constants=1"))


def test_a_chart_fills_the_screen_until_escape(server, open_page, rl):
    page = open_page(server.url, f"/console/runs/{rl.model_id}")
    reward = chart(page, "env/all/reward/total")
    small = reward.locator("canvas").bounding_box()
    reward.get_by_role("button", name="Full screen").click()
    page.wait_for_function("() => document.querySelector('.chart.expanded canvas').clientHeight > 500")
    assert reward.bounding_box() == {"x": 0, "y": 0, "width": 1280, "height": 900}
    page.keyboard.press("Escape")
    page.wait_for_function("() => !document.querySelector('.chart.expanded')")
    page.wait_for_function(
        "height => document.querySelector('.chart canvas').clientHeight === height", arg=small["height"]
    )


def exported(page: Page, name: str, kind: str) -> bytes:
    chart(page, name).locator("canvas").wait_for()
    chart(page, name).get_by_label(f"Export {name}").click()
    with page.expect_download() as downloaded:
        chart(page, name).get_by_role("button", name=kind, exact=True).click()
    assert downloaded.value.suggested_filename == f"{re.sub('[^a-z]+', '_', name)}.{kind.lower()}"
    found: bytes = downloaded.value.path().read_bytes()
    return found


def test_what_is_shown_is_exported(server, open_page, rl):
    page = open_page(server.url, f"/console/runs/{rl.model_id}")
    name = "env/all/reward/total"
    wait_for_points(page, name, NUM_STEPS)
    rows = list(csv.reader(io.StringIO(exported(page, name, "CSV").decode())))
    assert rows[0] == ["step", "sections"]
    assert [(int(step), float(value)) for step, value in rows[1:]] == [(step, step / 10) for step in range(NUM_STEPS)]
    assert exported(page, name, "PNG").startswith(b"\x89PNG\r\n\x1a\n")
    picture = Image.open(io.BytesIO(exported(page, name, "PNG"))).convert("RGB")
    assert picture.width >= 1200 and len(picture.resize((300, 200)).getcolors(60_000)) > 20
    tree = ET.fromstring(exported(page, name, "SVG"))
    tag = "{http://www.w3.org/2000/svg}"
    assert next(one.text for one in tree.iter(f"{tag}text")) == name
    flags = [one.find(f"{tag}polygon").attrib["fill"] for one in tree.iter(f"{tag}g") if one.get("class") == "mark"]
    assert len(flags) == 3 and len(set(flags)) == 2
    path = next(tree.iter(f"{tag}path")).attrib["d"]
    points = [tuple(map(float, one.split())) for one in path.removeprefix("M").split("L")]
    steps = [b - a for (a, _), (b, _) in itertools.pairwise(points)]
    rises = [a - b for (_, a), (_, b) in itertools.pairwise(points)]
    assert len(points) == NUM_STEPS and steps == pytest.approx([steps[0]] * 7, abs=0.3)
    assert rises == pytest.approx([rises[0]] * 7, abs=0.3) and rises[0] > 0


def test_a_value_that_is_not_finite_is_in_an_exported_picture(server, open_page, trainer):
    client = trainer.run(server.url)
    for step, value in enumerate((1.0, float("nan"), 3.0)):
        trainer.do(lambda s=step, v=value: client.log_metrics({"loss": v}, step=s).result())
    page = open_page(server.url, f"/console/runs/{client.model_id}")
    wait_for_points(page, "loss", 2)
    tree = ET.fromstring(exported(page, "loss", "SVG"))
    assert [one.get("class") for one in tree.iter("{http://www.w3.org/2000/svg}rect")].count("gap") == 1


def test_checkpoints_and_resumptions_are_marked(server, open_page, rl):
    page = open_page(server.url, f"/console/runs/{rl.model_id}")
    name = "env/all/reward/total"
    wait_for_points(page, name, NUM_STEPS)
    place = chart(page, name).locator(".u-over")
    place.wait_for()
    box = place.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 5 / 7, box["y"] + 20)
    tip = chart(page, name).locator(".chart-tip")
    expect(tip).to_contain_text("checkpoint five, after 5 steps")
    expect(tip).to_contain_text("resumed ")
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
    expect(tip).to_contain_text("checkpoint end, after 8 steps")
    page.mouse.move(box["x"] + box["width"] * 3 / 7, box["y"] + 20)
    expect(tip).to_be_hidden()
    page.get_by_label("marks").uncheck()
    page.mouse.move(box["x"] + box["width"] * 5 / 7, box["y"] + 20)
    expect(tip).to_be_hidden()
    expect(page).to_have_url(re.compile(r"marks=0"))


@pytest.mark.parametrize("axis", ["step", "elapsed"])
def test_a_click_tells_the_step_and_a_drag_does_not(server, open_page, rl, axis):
    page = open_page(server.url, f"/console/runs/{rl.model_id}?x={axis}")
    name = "env/all/reward/total"
    wait_for_points(page, name, NUM_STEPS)
    page.evaluate("window.told = []; addEventListener('lorimer:step', (event) => told.push(event.detail))")
    place = chart(page, name).locator(".u-over")
    place.wait_for()
    box = place.bounding_box()
    page.mouse.click(box["x"] + 1, box["y"] + 40)
    page.mouse.click(box["x"] + box["width"] - 1, box["y"] + 40)
    told = [{"run": rl.model_id, "step": step, "metric": name} for step in (0, NUM_STEPS - 1)]
    assert page.evaluate("told") == told
    page.mouse.move(box["x"] + 5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 40, steps=4)
    page.mouse.up()
    assert page.evaluate("told") == told


# ── the arrangement ─────────────────────────────────────────────────────────────────────────────────────

ARRANGE = """async ([names]) => {
    const { kindOf, sections } = await import("/console/static/metric_sections.js");
    const kind = kindOf(names);
    return [kind, sections(names, kind)];
}"""


@pytest.mark.parametrize(
    ("given", "kind", "order"),
    [
        (
            ["time/total", "health/x", "optim/kl", "loss:sum", "train/nll", "test/nll", "test/accuracy", "zebra/a"],
            "sft",
            ["train", "", "test", "optim", "zebra", "time", "health"],
        ),
        (
            ["optim/lr", "loss:sum", "env/b/reward/total", "env/all/reward/total", "env/all/ac_tokens", "async/stale"],
            "rl",
            ["env", "", "optim", "async"],
        ),
        (["loss:sum", "reward", "grad_norm"], "rl", [""]),
        (["loss:sum", "grad_norm"], "sft", [""]),
    ],
)
def test_loss_or_reward_come_first(server, open_page, given, kind, order):
    page = open_page(server.url)
    found, sections = page.evaluate(ARRANGE, [given])
    assert (found, [name for name, _ in sections]) == (kind, order)
    assert sorted(name for _, members in sections for name in members) == sorted(given)
    first = sections[0][1][0]
    assert ("reward" if kind == "rl" else "loss") in first or first == "train/nll"
    if "env/all/reward/total" in given:
        assert first == "env/all/reward/total"


def test_values_that_agree_up_to_rounding_are_copies(server, open_page):
    page = open_page(server.url)
    script = """async ([a, b]) => {
        const { agree, constantOf } = await import("/console/static/metric_sections.js");
        const points = (values) => new Map(values.map((value, step) => [step, [0, value]]));
        return [agree(points(a), points(b)), constantOf(points(a)) ?? "changes"];
    }"""
    assert page.evaluate(script, [[1.0, 2.0], [1.0, 2.0000001]]) == [True, "changes"]
    assert page.evaluate(script, [[1.0, 2.0], [1.0, 2.1]])[0] is False
    assert page.evaluate(script, [[1.0, None], [1.0, 2.0]]) == [False, "changes"]
    assert page.evaluate(script, [[3.0, 3.0], [3.0]]) == [True, 3]
    assert page.evaluate(script, [[3.0], []]) == [True, "changes"]


def test_a_metric_that_begins_to_change_becomes_a_chart(server, open_page, trainer):
    client = trainer.run(server.url)

    def report(step: int, value: float) -> None:
        body = {"points": [{"step": step, "values": {"flat": value}}]}
        httpx2.post(f"{server.url}/api/v1/training_runs/{client.model_id}/metrics", json=body, timeout=SECONDS)

    for step in range(3):
        report(step, 1.0)
    page = open_page(server.url, f"/console/runs/{client.model_id}")
    expect(section(page, "constants")).to_be_visible()
    report(3, 2.0)
    expect(chart(page, "flat")).to_have_attribute("data-points", "4")
    expect(section(page, "constants")).to_have_count(0)
