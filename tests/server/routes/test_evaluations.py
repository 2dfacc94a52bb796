"""Evaluations over HTTP: estimates from grades, comparisons by paired tests, and what others may see."""

import pytest

from lorimer.types.estimates import proportion

from .conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

ITEMS = [f"q{number}" for number in range(8)]


def body(model=MODEL, right=5, **values):
    grades = [1.0] * right + [0.0] * (len(ITEMS) - right)
    return {"model": model, "task": "sums", "items": ITEMS, "grades": grades, "settings": {"temperature": 0}} | values


async def listed(client, **query):
    words = "&".join(f"{name}={value}" for name, value in query.items())
    return (await client.fetch(f"evaluations?{words}"))["evaluations"]


async def test_a_result_has_its_interval(ada):
    made = await ada.ok("evaluations", body(task="interval"))
    expected = proportion(5, 8)
    assert (made["value"], made["low"], made["high"]) == pytest.approx((5 / 8, expected.low, expected.high))
    assert (made["method"], made["num_items"], made["base_model"], made["metrics"]) == ("wilson", 8, MODEL, {})
    assert await listed(ada, task="interval") == [made]
    whole = await ada.fetch(f"evaluations/{made['evaluation_id']}")
    assert whole == made | {"items": ITEMS, "grades": [1.0] * 5 + [0.0] * 3}
    deleted = await ada.send("DELETE", f"evaluations/{made['evaluation_id']}")
    assert (deleted.status_code, await listed(ada, task="interval")) == (204, [])


async def test_samples_give_pass_at_k(ada):
    grades = [1, 0, 0, 0, 1, 1, 0, 0]
    made = await ada.ok("evaluations", body(task="samples", items=["a", "b"], grades=grades, num_samples=4))
    assert made["value"] == pytest.approx(3 / 8)
    values = {name: one["value"] for name, one in made["metrics"].items()}
    assert values == pytest.approx({"pass@1": 3 / 8, "pass@2": (1 / 2 + 5 / 6) / 2, "pass@4": 1.0})


async def test_models_are_compared_on_the_items_of_both(ada):
    first = await ada.ok("evaluations", body(task="pairs", right=1))
    second = await ada.ok("evaluations", body(task="pairs", right=8, items=[*ITEMS[:-1], "new"]))
    ids = f"first={first['evaluation_id']}&second={second['evaluation_id']}"
    (found,) = (await ada.fetch(f"evaluation_comparisons?{ids}"))["comparisons"]
    assert (found["num_items"], found["num_first_better"], found["num_second_better"]) == (7, 0, 6)
    assert (found["test"], found["p_value"], found["is_significant"]) == ("mcnemar", 2 / 64, True)
    assert found["difference"]["value"] == pytest.approx(6 / 7)
    (same,) = (await ada.fetch(f"evaluation_comparisons?first={MODEL}&second={MODEL}&task=pairs"))["comparisons"]
    assert (same["p_value"], same["first"]) == (1.0, second), "the newest"
    other = await ada.ok("evaluations", body(task="pairs", items=["z"], grades=[0.5], settings={"temperature": 1}))
    refused = await ada.get(f"evaluation_comparisons?first={first['evaluation_id']}&second={other['evaluation_id']}")
    assert refused.status_code == 400 and "in common" in refused.json()["detail"]


async def test_settings_that_differ_are_named(ada):
    cold = await ada.ok("evaluations", body(task="differ"))
    hot = await ada.ok("evaluations", body(task="differ", settings={"temperature": 1, "seed": 3}))
    assert cold["variant"] != hot["variant"]
    ids = f"first={cold['evaluation_id']}&second={hot['evaluation_id']}"
    (found,) = (await ada.fetch(f"evaluation_comparisons?{ids}"))["comparisons"]
    assert found["differing_settings"] == ["seed", "temperature"]


async def test_others_do_not_see_it(ada, bob):
    made = await ada.ok("evaluations", body(task="private"))
    address = f"evaluations/{made['evaluation_id']}"
    answers = [await bob.get(address), await bob.send("DELETE", address), await bob.get("evaluations/nothing")]
    compared = f"evaluation_comparisons?first={made['evaluation_id']}&second={made['evaluation_id']}"
    assert [answer.status_code for answer in [*answers, await bob.get(compared)]] == [404] * 4
    assert await listed(bob, task="private") == []
    assert await listed(ada, task="private") == [made]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"grades": [1.0]}, "1 grades for 8 items"),
        ({"items": ["a"] * 8}, "named twice"),
        ({"items": [], "grades": []}, "at least 1"),
        ({"grades": [None] * 8}, "null"),
        ({"grades": [1e10] * 8}, "1e9"),
        ({"task": "a\nb"}, "task"),
        ({"model": "nothing/served"}, "not served"),
        ({"model": "tinker://nothing:train:0/sampler_weights/x"}, "no checkpoint"),
        ({"harness": "mine"}, "harness"),
        ({"num_samples": 0}, "num_samples"),
        ({"settings": {"a": "x" * 10**6}}, "settings"),
    ],
)
async def test_refuses_by_name_and_stores_nothing(ada, wrong, words):
    refused = await ada.post("evaluations", body(**{"task": "wrong"} | wrong))
    assert refused.status_code in (400, 404, 413, 422), refused.text
    assert words in refused.json()["detail"]
    assert await listed(ada, task="wrong") == []
