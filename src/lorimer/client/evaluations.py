"""Evaluations: grades of checkpoints and base models, stored beside them and compared by paired tests; ours alone."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

from lorimer.client.admin import Caller
from lorimer.types.base import validate
from lorimer.types.evaluations import (
    CreateEvaluationRequest,
    Evaluation,
    EvaluationComparisonsResponse,
    EvaluationDetails,
    EvaluationsResponse,
    Harness,
)


def evaluation_path(evaluation_id: str) -> str:
    return f"/evaluations/{quote(evaluation_id, safe='')}"


class EvaluationsClient(Caller):
    """A model is a ``tinker://`` path or the name of a base model."""

    def create_evaluation(
        self,
        model: str,
        task: str,
        items: Sequence[str],
        grades: Sequence[float],
        *,
        num_samples: int = 1,
        metric: str = "accuracy",
        settings: Mapping[str, Any] | None = None,
        harness: Harness = "lorimer",
    ) -> "Future[Evaluation]":
        """Store the grades of a model: for each item in turn those of its samples. Return the estimates from them."""
        given = {
            "model": model,
            "task": task,
            "metric": metric,
            "harness": harness,
            "settings": dict(settings or {}),
            "items": list(items),
            "grades": list(grades),
            "num_samples": num_samples,
        }
        body = validate(CreateEvaluationRequest, given)
        return self._start("create_evaluation", Evaluation, "POST", "/evaluations", body)

    async def create_evaluation_async(
        self,
        model: str,
        task: str,
        items: Sequence[str],
        grades: Sequence[float],
        *,
        num_samples: int = 1,
        metric: str = "accuracy",
        settings: Mapping[str, Any] | None = None,
        harness: Harness = "lorimer",
    ) -> Evaluation:
        return await self._wait(
            self.create_evaluation(
                model,
                task,
                items,
                grades,
                num_samples=num_samples,
                metric=metric,
                settings=settings,
                harness=harness,
            )
        )

    def list_evaluations(
        self,
        *,
        model: str | None = None,
        task: str | None = None,
        run_id: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> "Future[EvaluationsResponse]":
        """Return the newest evaluations: all, or those of a model, a task, or the checkpoints of a run."""
        query = {"model": model, "task": task, "run_id": run_id, "limit": limit, "offset": offset}
        return self._start("list_evaluations", EvaluationsResponse, "GET", "/evaluations", query=query)

    async def list_evaluations_async(
        self,
        *,
        model: str | None = None,
        task: str | None = None,
        run_id: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> EvaluationsResponse:
        return await self._wait(
            self.list_evaluations(model=model, task=task, run_id=run_id, limit=limit, offset=offset)
        )

    def get_evaluation(self, evaluation_id: str) -> "Future[EvaluationDetails]":
        """Return an evaluation with the grades of its items."""
        return self._start("get_evaluation", EvaluationDetails, "GET", evaluation_path(evaluation_id))

    async def get_evaluation_async(self, evaluation_id: str) -> EvaluationDetails:
        return await self._wait(self.get_evaluation(evaluation_id))

    def delete_evaluation(self, evaluation_id: str) -> "Future[None]":
        return self._do("delete_evaluation", "DELETE", evaluation_path(evaluation_id))

    async def delete_evaluation_async(self, evaluation_id: str) -> None:
        await self._wait(self.delete_evaluation(evaluation_id))

    def compare_evaluations(
        self, first: str, second: str, *, task: str | None = None
    ) -> "Future[EvaluationComparisonsResponse]":
        """Compare two models, or two evaluations by their ids, on the items that both were asked."""
        query = {"first": first, "second": second, "task": task}
        return self._start(
            "compare_evaluations", EvaluationComparisonsResponse, "GET", "/evaluation_comparisons", query=query
        )

    async def compare_evaluations_async(
        self, first: str, second: str, *, task: str | None = None
    ) -> EvaluationComparisonsResponse:
        return await self._wait(self.compare_evaluations(first, second, task=task))
