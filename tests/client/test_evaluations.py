"""Evaluations by the SDK, in both manners of calling."""

import pytest

import lorimer
from lorimer.errors import InvalidInput
from tests.client.conftest import MODEL


async def test_store_list_compare_delete(service: lorimer.ServiceClient) -> None:
    rest = service.create_rest_client()
    items = [f"q{number}" for number in range(6)]
    first = rest.create_evaluation(MODEL, "sdk", items, [1, 1, 0, 0, 0, 0], settings={"seed": 1}).result()
    second = await rest.create_evaluation_async(MODEL, "sdk", items, [0, 1, 1, 1, 1, 1], settings={"seed": 1})
    assert (first.value, second.value) == pytest.approx((1 / 3, 5 / 6))
    assert first.variant == second.variant
    listed = await rest.list_evaluations_async(task="sdk")
    assert listed.evaluations == rest.list_evaluations(model=MODEL, task="sdk").result().evaluations == [second, first]
    whole = await rest.get_evaluation_async(first.evaluation_id)
    assert (whole.items, whole.grades) == (items, [1, 1, 0, 0, 0, 0])
    assert whole == rest.get_evaluation(first.evaluation_id).result()
    ids = (first.evaluation_id, second.evaluation_id)
    (found,) = (await rest.compare_evaluations_async(*ids)).comparisons
    assert (found.num_first_better, found.num_second_better, found.p_value) == (1, 4, 0.375)
    assert rest.compare_evaluations(*ids, task="sdk").result().comparisons == [found]
    rest.delete_evaluation(ids[0]).result()
    await rest.delete_evaluation_async(ids[1])
    assert (await rest.list_evaluations_async(task="sdk")).total_count == 0
    with pytest.raises(lorimer.NotFoundError, match="no evaluation"):
        rest.get_evaluation(ids[0]).result()
    with pytest.raises(InvalidInput, match="1 grades for 6 items"):
        rest.create_evaluation(MODEL, "sdk", items, [1])
