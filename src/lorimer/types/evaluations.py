"""Messages about evaluations: the grades of a model on the items of a task, estimates from them, and comparisons.

The server computes every estimate from the grades that a client sends, so that all results are computed alike.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lorimer.types.base import Request, Response
from lorimer.types.estimates import Method, Test

Harness = Literal["lorimer", "inspect", "lm-eval"]

MAX_ITEMS = 100_000
MAX_SAMPLES = 1000
MAX_GRADES = 1_000_000
MAX_ID_CHARS = 200

Word = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class CreateEvaluationRequest(Request):
    model: str
    """A ``tinker://`` path, or the name of a base model."""
    task: Word
    metric: Word = "accuracy"
    """What a grade is: ``accuracy``, ``score``, ..."""
    harness: Harness = "lorimer"
    settings: dict[str, Any] = Field(default_factory=dict)
    """What the result depends on besides the model: temperature, limits, judge. Results with the same settings on the
    same items can be ranked."""
    items: Annotated[list[ItemId], Field(min_length=1, max_length=MAX_ITEMS)]
    """An id for each item, which is the same whenever the same question is asked."""
    grades: Annotated[list[float], Field(max_length=MAX_GRADES)]
    """For each item in turn the grades of its samples."""
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1

    @model_validator(mode="after")
    def _check_grades(self) -> Self:
        if len(self.grades) != len(self.items) * self.num_samples:
            raise ValueError(
                f"there are {len(self.grades)} grades for {len(self.items)} items of {self.num_samples} samples;"
                " one grade for each sample is accepted"
            )
        if len(set(self.items)) != len(self.items):
            raise ValueError("an item is named twice; each item has an id of its own")
        if any(abs(grade) > 1e9 for grade in self.grades):
            raise ValueError("a grade is beyond ±1e9; smaller ones are accepted")
        return self


class Estimate(Response):
    value: float
    std_error: float | None = None
    low: float | None = None
    """With ``high`` the 95 % confidence interval; none where one item leaves it open."""
    high: float | None = None
    method: Method
    """How the interval was computed: Wilson's score interval of a proportion, or Student's t of a mean."""


class Evaluation(Estimate):
    evaluation_id: str
    model: str
    base_model: str
    run_id: str | None = None
    run_name: str | None = None
    """Of the caller's run that saved the checkpoint."""
    step: int | None = None
    task: str
    metric: str
    harness: Harness
    settings: dict[str, Any] = Field(default_factory=dict)
    variant: str
    """The same for results of the same task with the same settings on the same items, which can be ranked."""
    num_items: int
    num_samples: int = 1
    metrics: dict[str, Estimate] = Field(default_factory=dict)
    """More estimates from the same grades: ``pass@k``."""
    created_at: datetime


class EvaluationDetails(Evaluation):
    items: list[str]
    grades: list[float]


class EvaluationsResponse(Response):
    evaluations: list[Evaluation]
    """Newest first."""
    total_count: int


class EvaluationComparison(Response):
    """Two evaluations of one task, on the items that both have."""

    task: str
    metric: str
    first: Evaluation
    second: Evaluation
    num_items: int
    difference: Estimate
    """The second minus the first."""
    num_first_better: int
    num_second_better: int
    test: Test
    p_value: float
    is_significant: bool
    """Whether ``p_value`` is below 0.05."""
    differing_settings: list[str] = Field(default_factory=list)
    """Settings that are not the same, which the difference may be due to."""


class EvaluationComparisonsResponse(Response):
    comparisons: list[EvaluationComparison]
