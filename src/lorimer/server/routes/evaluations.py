"""Routes for evaluations: store the grades of a model, list results, read one item by item, compare two, delete.

An evaluation belongs to the user who stored it. It can be of a base model, of an own checkpoint, or of a published one.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput, NotFound
from lorimer.server.bodies import decode
from lorimer.server.body_limits import evaluation_limits
from lorimer.server.context import context_of, user_of
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.field_checks import check_metadata, check_text
from lorimer.server.routes.models import check_served
from lorimer.server.routes.ownership import find_checkpoint, look_up, quote_id
from lorimer.server.routes.queries import PAGE, query_page, query_text
from lorimer.server.routes.replies import done, reply
from lorimer.store import evaluations
from lorimer.store.evaluations import Evaluation, Filter, Outcomes
from lorimer.types import evaluations as wire
from lorimer.types.estimates import compare, estimate
from lorimer.types.paths import SCHEME

EVALUATION = "/api/v1/evaluations/{evaluation_id}"
P_VALUE = 0.05
MAX_COMPARED = 2000
"""Evaluations of a model that are looked through for a pair."""


async def create_evaluation(request: Request) -> Response:
    """Store the grades of a model on the items of a task, with the estimates from them."""
    context = context_of(request)
    body = await decode(request, wire.CreateEvaluationRequest, evaluation_limits(context.settings))
    check_text(context.settings, model=body.model)
    check_metadata(context.settings, body.settings, "settings")
    values = {
        "user_id": user_of(request).user_id,
        "model": body.model,
        **await measured_weights(request, body.model),
        **{name: getattr(body, name) for name in ("task", "metric", "harness", "settings")},
    }
    grades = np.array(body.grades, np.float64).reshape(len(body.items), body.num_samples)
    found = await asyncio.to_thread(estimate, grades)
    estimates = {name: asdict(one) for name, one in found.items()}
    made = await context.store.write(evaluations.add, values, Outcomes(body.items, grades), estimates)
    return reply(shown(made))


async def measured_weights(request: Request, model: str) -> dict[str, str | None]:
    """Return the checkpoint, if the model is one that the caller may read, and the base model."""
    if not model.startswith(SCHEME):
        check_served(context_of(request), model)
        return {"checkpoint_key": None, "base_model": model}
    found = await find_checkpoint(request, model, to_read=True)
    if found.kind == "external":
        raise InvalidInput(f"{quote_id(model)} is an export; paths with /weights/ or /sampler_weights/ are evaluated")
    return {"checkpoint_key": found.checkpoint_key, "base_model": found.weights.base_model}


async def list_evaluations(request: Request) -> Response:
    """List the caller's evaluations, newest first: all, or those of a model, a task or a run."""
    names = ("model", "task", "run_id")
    chosen = Filter(user_of(request).user_id, **{name: query_text(request, name) for name in names})
    limit, offset = query_page(request, 100)
    found, total = await context_of(request).store.read(evaluations.list_evaluations, chosen, limit, offset)
    return reply(wire.EvaluationsResponse(evaluations=[shown(one) for one in found], total_count=total))


async def get_evaluation(request: Request) -> Response:
    """Return an evaluation with the grades of its items."""
    found = await find_evaluation(request, request.path_params["evaluation_id"])
    outcomes = await read_outcomes(request, found)
    grades = outcomes.grades.ravel().tolist()
    return reply(wire.EvaluationDetails(**shown(found).model_dump(), items=outcomes.items, grades=grades))


async def delete_evaluation(request: Request) -> Response:
    """Delete an evaluation."""
    found = await find_evaluation(request, request.path_params["evaluation_id"])
    await context_of(request).store.write(evaluations.delete_evaluation, found.evaluation_id)
    return done()


async def find_evaluation(request: Request, evaluation_id: str) -> Evaluation:
    """Return the caller's evaluation. Raise `NotFound` otherwise."""
    found = await look_up(request, evaluations.get, evaluation_id)
    if found is None or found.user_id != user_of(request).user_id:
        raise NotFound(f"there is no evaluation {quote_id(evaluation_id)}")
    return found


async def read_outcomes(request: Request, one: Evaluation) -> Outcomes:
    found = await context_of(request).store.read(evaluations.read_outcomes, one.evaluation_id)
    if found is None:
        raise NotFound(f"evaluation {quote_id(one.evaluation_id)} was deleted meanwhile")
    return found


def shown(one: Evaluation) -> wire.Evaluation:
    facts = {name: value for name, value in vars(one).items() if name in wire.Evaluation.model_fields}
    more = {name: value for name, value in one.estimates.items() if name != "mean"}
    return wire.Evaluation.model_validate(facts | one.estimates["mean"] | {"metrics": more})


# ── comparisons ───────────────────────────────────────────────────────────────────────────────────────


async def compare_evaluations(request: Request) -> Response:
    """Compare two evaluations, or two models on each task that both were evaluated on, by paired tests."""
    first, second = [await compared(request, name) for name in ("first", "second")]
    task = query_text(request, "task")
    pairs = [pair for pair in matched(first, second) if task in (None, pair[0].task)]
    found = [one for one in [await compare_pair(request, *pair) for pair in pairs] if one is not None]
    if not found:
        raise InvalidInput("the two have no items of a task in common; evaluations of the same task are compared")
    return reply(wire.EvaluationComparisonsResponse(comparisons=found))


async def compared(request: Request, name: str) -> list[Evaluation]:
    """Return the evaluation that a parameter names, or all those of the model that it names, newest first."""
    text = query_text(request, name)
    if not text:
        raise InvalidInput(f"{name} is missing; the id of an evaluation, a tinker:// path or a base model is accepted")
    user_id = user_of(request).user_id
    one = await look_up(request, evaluations.get, text)
    if one is not None and one.user_id == user_id:
        return [one]
    store = context_of(request).store
    found, _ = await store.read(evaluations.list_evaluations, Filter(user_id, model=text), MAX_COMPARED, 0)
    if not found:
        raise NotFound(f"there is no evaluation {quote_id(text)}, nor one of a model of this name")
    return list(found)


def matched(first: list[Evaluation], second: list[Evaluation]) -> list[tuple[Evaluation, Evaluation]]:
    """Return for each task of both the newest pair with the same settings and items, else the newest of each."""
    by_variant = newest(second, lambda one: (one.task, one.metric, one.variant))
    by_task = newest(second, lambda one: (one.task, one.metric))
    pairs: dict[Any, tuple[Evaluation, Evaluation]] = {}
    for one in first:
        if other := by_variant.get((one.task, one.metric, one.variant)):
            pairs.setdefault((one.task, one.metric), (one, other))
    for one in first:
        if other := by_task.get((one.task, one.metric)):
            pairs.setdefault((one.task, one.metric), (one, other))
    return list(pairs.values())


def newest(found: Iterable[Evaluation], key: Any) -> dict[Any, Evaluation]:
    kept: dict[Any, Evaluation] = {}
    for one in found:
        kept.setdefault(key(one), one)
    return kept


async def compare_pair(request: Request, one: Evaluation, other: Evaluation) -> wire.EvaluationComparison | None:
    grades = evaluations.shared(await read_outcomes(request, one), await read_outcomes(request, other))
    if not len(grades[0]):
        return None
    found = await asyncio.to_thread(compare, *grades)
    names = sorted(one.settings.keys() | other.settings.keys())
    return wire.EvaluationComparison(
        task=one.task,
        metric=one.metric,
        first=shown(one),
        second=shown(other),
        **vars(found) | {"difference": wire.Estimate(**vars(found.difference))},
        is_significant=found.p_value < P_VALUE,
        differing_settings=[name for name in names if one.settings.get(name) != other.settings.get(name)],
    )


TEXT = {"type": "string"}
ROUTES = [
    Endpoint(
        "GET",
        "/api/v1/evaluations",
        list_evaluations,
        query=PAGE | {"model": TEXT, "task": TEXT, "run_id": TEXT},
        answer=wire.EvaluationsResponse,
    ),
    Endpoint(
        "POST",
        "/api/v1/evaluations",
        create_evaluation,
        body=wire.CreateEvaluationRequest,
        answer=wire.Evaluation,
    ),
    Endpoint("GET", EVALUATION, get_evaluation, answer=wire.EvaluationDetails),
    Endpoint("DELETE", EVALUATION, delete_evaluation, status=204),
    Endpoint(
        "GET",
        "/api/v1/evaluation_comparisons",
        compare_evaluations,
        query={"first": TEXT | {"required": True}, "second": TEXT | {"required": True}, "task": TEXT},
        answer=wire.EvaluationComparisonsResponse,
    ),
]
