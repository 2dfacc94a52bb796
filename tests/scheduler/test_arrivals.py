"""What arrives at a core from another process: operations, cancellations, numbers that were refused there."""

from pathlib import Path

from lorimer import types
from lorimer.scheduler import events, journal
from lorimer.scheduler.core import Core
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.runs import Operation
from lorimer.scheduler.samples import Sample
from lorimer.store.runs import Run
from tests.scheduler.test_eviction import ROW

RUN = Run(model_id="run", **ROW | {"replica": "m#0"})


def new_core() -> Core:
    return Core("m", SchedulerLimits(), Path("/data/weights"), Path("/data/snapshots"), 1, "m#0")


def sample(request_id: str) -> Sample:
    request = types.SampleRequest(
        num_samples=1,
        prompt=types.ModelInput.from_ints([1]),
        sampling_params=types.SamplingParams(max_tokens=2, seed=1),
    )
    return Sample(request_id, "u", "s", "m", "sampler", 1, "sample", tokens=1, request=request, weights_id=None)


def operation(request_id: str, seq_id: int) -> Operation:
    return Operation(request_id, "u", "s", "m", "run", seq_id, "forward_backward", tokens=3, payload=b"x", place="m#0")


def failures(effects: list) -> list[journal.Fail]:
    commits = [effect.transaction for effect in effects if isinstance(effect, events.Commit)]
    return [transaction for transaction in commits if isinstance(transaction, journal.Fail)]


def test_a_cancellation_may_arrive_before_its_sample():
    core = new_core()
    core.handle([events.Cancelled("r1")], 0.0)
    (failed,) = failures(core.handle([events.Arrived(sample("r1"))], 1.0))
    assert (failed.operation.request_id, failed.state) == ("r1", "cancelled")
    assert not failures(core.handle([events.Arrived(sample("r2"))], 2.0))


def test_an_operation_that_arrives_twice_is_there_once():
    core = new_core()
    core.handle([events.Arrived(operation("r1", 1), RUN), events.Arrived(operation("r1", 1), RUN)], 0.0)
    assert list(core.open) == ["r1"]
    assert core.num_open == 1


def test_a_row_of_another_replica_is_not_adopted():
    core = new_core()
    mine, theirs = operation("r1", 1), operation("r2", 1)
    (commit,) = core.handle([events.Submitted(mine, RUN)], 0.0)
    row = theirs.__dict__ | {"state": "queued", "place": "m#1"}
    found = type("Row", (), row)()
    effects = core.handle([events.Committed(commit.transaction, (found, False))], 1.0)
    assert not core.open
    assert [effect.request_id for effect in effects if isinstance(effect, events.Admit)] == ["r2"]
