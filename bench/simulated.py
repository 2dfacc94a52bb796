"""Provides an in-memory journal and an engine that only records operations, for the real scheduler core.

`MemoryJournal` implements every transaction of the scheduler as the database does. `SimulatedEngine` computes nothing:
the weights of a run are the list of operations applied to it, so that a lost, duplicate or reordered operation is
visible. The tests of the core kill both; ``bench/simulate.py`` adds a virtual clock.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from lorimer.engine import messages
from lorimer.errors import CheckpointError, EngineError, InvalidInput, LorimerError
from lorimer.scheduler import journal, placement
from lorimer.scheduler.engine_deaths import RecordDeath
from lorimer.scheduler.payloads import Load, Save, SaveEphemeral
from lorimer.scheduler.runs import MISSING, REPLAYED, Journal, Operation, Outcome, needs_payload
from lorimer.store.futures import FutureRow
from lorimer.store.runs import NO_SNAPSHOT, Run
from lorimer.store.weights import Weights

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SEQUENCE = messages.SampledSequence(tokens=np.zeros(1, "i4"), logprobs=np.zeros(1, "f4"), stop_reason="stop")


class MemoryJournal:
    """The rows and payloads that survive a kill of the server."""

    def __init__(self) -> None:
        self.rows: dict[str, FutureRow] = {}
        self.payloads: dict[str, bytes] = {}
        self.results: dict[str, Outcome] = {}
        self.runs: dict[str, Run] = {}
        self.weights: dict[str, str] = {}
        """Directory names by weights_id."""
        self._numbers: dict[tuple[str, int], str] = {}
        self._lanes: dict[str, dict[int, str]] = {}

    def apply(self, transaction: journal.Transaction) -> Any:
        return getattr(self, f"_{type(transaction).__name__}")(transaction)

    def unfinished(self) -> Iterator[FutureRow]:
        return (row for row in list(self.rows.values()) if row.state == "queued")

    def lane(self, lane: str, after: int) -> list[FutureRow]:
        numbers = self._lanes.get(lane, {})
        return [self.rows[numbers[seq]] for seq in sorted(numbers) if seq > after]

    def _insert(self, operation: Operation, **values: Any) -> tuple[FutureRow, bool]:
        key = operation.lane, values.pop("seq_id", operation.seq_id)
        if key in self._numbers:
            return self.rows[self._numbers[key]], False
        row = FutureRow(
            request_id=operation.request_id,
            user_id=operation.user_id,
            session_id=operation.session_id,
            kind=values.get("kind", operation.kind),
            lane=operation.lane,
            seq_id=key[1],
            state=values.get("state", "queued"),
            error=values.get("error"),
            category=values.get("category"),
            received_at=NOW,
            started_at=None,
            finished_at=None,
            fetched_at=None,
            tokens=values.get("tokens", operation.tokens),
            result_format=None,
            result_size=0,
            payload_sha256=hashlib.sha256(operation.payload).hexdigest(),
            place=operation.place,
        )
        self._numbers[key] = row.request_id
        self._lanes.setdefault(key[0], {})[key[1]] = row.request_id
        self.rows[row.request_id] = row
        if operation.payload:
            self.payloads[row.request_id] = operation.payload
        return row, True

    def _Accept(self, transaction: journal.Accept) -> tuple[FutureRow, bool]:
        operation = transaction.operation
        key = operation.lane, operation.seq_id
        if transaction.has_passed and key not in self._numbers:
            raise InvalidInput(f"operation {operation.seq_id} was answered long ago")
        row, is_new = self._insert(operation)
        if transaction.moves_run:
            self.runs[operation.lane] = replace(self.runs[operation.lane], replica=operation.place)
        if not is_new and row.kind != operation.kind and row.state not in ("rejected", "abandoned"):
            raise InvalidInput("another kind")
        return row, is_new

    def _AcceptAt(self, transaction: placement.AcceptAt) -> tuple[FutureRow, bool]:
        operation = transaction.operation
        run = self.runs[operation.lane]
        if run.replica is None:
            run = self.runs[run.model_id] = replace(run, replica=operation.place)
        operation.place = run.replica
        return self._insert(operation)

    def _AcceptRun(self, transaction: journal.AcceptRun) -> tuple[Run, FutureRow, bool]:
        operation, values = transaction.operation, transaction.values
        model_id = f"{operation.session_id}:train:{operation.seq_id}"
        if model_id not in self.runs:
            self.runs[model_id] = Run(
                model_id=model_id,
                session_id=operation.session_id,
                user_id=operation.user_id,
                project_id=None,
                model_seq_id=operation.seq_id,
                base_model=values.base_model,
                rank=values.rank,
                seed=values.seed,
                train_attn=True,
                train_mlp=True,
                train_unembed=True,
                optimizer_type="adamw",
                user_metadata={},
                created_at=NOW,
                last_request_at=NOW,
                snapshot_seq=NO_SNAPSHOT,
                snapshot_name=None,
                newest_seq=None,
                newest_name=None,
                corrupted=None,
                is_unloaded=False,
                replica=operation.place,
            )
        return self.runs[model_id], *self._insert(operation)

    def _Consume(self, transaction: journal.Consume) -> bool:
        return self._insert(transaction.operation, kind="rejected", state="rejected", error=transaction.reason)[1]

    def _ReadJournal(self, transaction: journal.ReadJournal) -> Journal | None:
        run = self.runs.get(transaction.model_id)
        if run is None:
            return None
        rows = self.lane(run.model_id, max(run.resume_seq, 0))
        wanted = [row.request_id for row in rows if needs_payload(row)]
        payloads = {request_id: self.payloads[request_id] for request_id in wanted if request_id in self.payloads}
        creation = None
        if run.resume_name is None:
            creation = self.payloads.get(self._numbers[f"{run.session_id}:models", run.model_seq_id])
        return Journal(run, rows, payloads, creation)

    def _FallBack(self, transaction: journal.FallBack) -> Journal | None:
        run = self.runs[transaction.model_id]
        if run.newest_name == transaction.damaged:
            self.runs[run.model_id] = replace(run, newest_seq=None, newest_name=None)
        return self._ReadJournal(journal.ReadJournal(run.model_id, transaction.restore))

    def _FindWeights(self, transaction: journal.FindWeights) -> Weights | None:
        name = self.weights.get(transaction.weights_id)
        if name is None:
            return None
        return Weights(transaction.weights_id, name, "m", 4, True, True, True, "adamw", False, 0, {}, NOW)

    def _finish(self, operation: Operation, outcome: Outcome, state: str = "done") -> Outcome:
        row = self.rows[operation.request_id]
        if row.state != "queued":
            return self.results.get(row.request_id, Outcome("failed", error=row.error or ""))
        self.rows[row.request_id] = replace(row, state=state)  # type: ignore[arg-type]
        self.results[row.request_id] = outcome
        return outcome

    def _Fail(self, transaction: journal.Fail) -> Outcome:
        outcome = Outcome("failed", error=transaction.error, category=transaction.category)
        return self._finish(transaction.operation, outcome, transaction.state)

    def _Abandon(self, transaction: journal.Abandon) -> list[Outcome]:
        run = transaction.run
        for first, last in transaction.gaps:
            marker = Operation(
                f"gap:{run.model_id}:{last}", run.user_id, run.session_id, "", run.model_id, last, MISSING
            )
            self._insert(marker, tokens=last - first + 1, state="abandoned", error=transaction.reason)
        return [self._Fail(journal.Fail(operation, transaction.reason, "user")) for operation in transaction.operations]

    def _SetSnapshot(self, transaction: journal.SetSnapshot) -> tuple[Run | None, list[str]]:
        run, obsolete = self.runs[transaction.model_id], []
        if transaction.verified is not None and run.newest_name == transaction.verified:
            obsolete.append(run.snapshot_name)
            assert run.newest_seq is not None
            run = replace(
                run, snapshot_seq=run.newest_seq, snapshot_name=run.newest_name, newest_seq=None, newest_name=None
            )
        if run.resume_seq > transaction.seq_id:
            obsolete.append(transaction.name)
        else:
            obsolete.append(run.newest_name)
            run = replace(run, newest_seq=transaction.seq_id, newest_name=transaction.name)
        self.runs[run.model_id] = run
        for row in self.lane(run.model_id, -1):
            is_replayed = row.state == "done" and row.kind in REPLAYED and (row.seq_id or 0) > run.snapshot_seq
            if row.state != "queued" and not is_replayed:
                self.payloads.pop(row.request_id, None)
        return run, [name for name in obsolete if name is not None]

    def _Release(self, transaction: placement.Release) -> bool:
        run = self.runs[transaction.model_id]
        if any(row.state == "queued" for row in self.lane(run.model_id, -1)):
            return False
        if run.replica == transaction.place:
            self.runs[run.model_id] = replace(run, replica=None)
        return True

    def _MarkCorrupted(self, transaction: journal.MarkCorrupted) -> None:
        run = self.runs[transaction.model_id]
        self.runs[run.model_id] = replace(run, corrupted=run.corrupted or transaction.reason)

    def _RecordDeath(self, transaction: RecordDeath) -> None:
        for request_id in transaction.request_ids:
            row = self.rows[request_id]
            self.rows[request_id] = replace(row, deaths=row.deaths + 1)

    def _FinishCreation(self, transaction: journal.FinishCreation) -> Outcome:
        return self._finish(transaction.operation, Outcome("done", result=b"created"))

    def _FinishOperation(self, transaction: journal.FinishOperation) -> journal.Finished:
        operation, flight = transaction.operation, transaction.flight
        if self.rows[operation.request_id].state != "queued":
            return journal.Finished(self.results[operation.request_id])
        snapshot = None
        match flight.payload:
            case Load():
                assert flight.target is not None
                snapshot = self._SetSnapshot(
                    journal.SetSnapshot(operation.lane, operation.seq_id, flight.target, flight.verified)
                )
            case Save() | SaveEphemeral():
                assert flight.target is not None
                self.weights[f"{operation.lane}/{operation.seq_id}"] = flight.target
        return journal.Finished(self._finish(operation, Outcome("done", result=b"done")), snapshot)

    def _FinishSample(self, transaction: journal.FinishSample) -> Outcome:
        return self._finish(transaction.operation, Outcome("done", result=b"sampled"))

    def _RecordUsage(self, transaction: journal.RecordUsage) -> None:
        pass


@dataclass
class SimulatedRun:
    applied: list[tuple[str, int]] = field(default_factory=list)
    """Steps and loads, each step with the gradients that it applied."""
    gradient: list[tuple[str, int]] = field(default_factory=list)

    def copy(self) -> "SimulatedRun":
        return SimulatedRun(list(self.applied), list(self.gradient))


class SimulatedEngine:
    """Executes commands sequentially; its directories survive a kill."""

    def __init__(self, disk: dict[str, SimulatedRun], save_seconds: float = 0.01) -> None:
        """``disk`` has the saved runs by directory name; ``save_seconds`` is what the engine says that saving took."""
        self.disk, self.save_seconds = disk, save_seconds
        self.runs: dict[str, SimulatedRun] = {}
        self.samplers: set[str] = set()

    def run(self, command: messages.Command | Operation) -> messages.Result | LorimerError:
        try:
            return self._run(command)
        except LorimerError as error:
            return error

    def _run(self, command: Any) -> messages.Result:
        match command:
            case Operation(kind="forward_backward" | "forward" as kind, lane=lane, seq_id=seq_id):
                run = self._run_of(lane)
                if kind == "forward_backward":
                    run.gradient.append(("forward_backward", seq_id))
                return messages.TrainResult(logprobs=[np.zeros(1, "f4")], metrics={})
            case Operation():
                sequence = messages.SampledSequence(
                    tokens=np.zeros(1, "i4"), logprobs=np.zeros(1, "f4"), stop_reason="stop"
                )
                return messages.SampleResult(sequences=[sequence], prompt_tokens=1)
            case messages.CreateRun(model_id=model_id):
                self.runs[model_id] = SimulatedRun()
            case messages.OptimStep(model_id=model_id, params=params):
                run = self._run_of(model_id)
                stepped = params["seq_id"]
                assert isinstance(stepped, int | float)
                run.applied += [*run.gradient, ("optim_step", int(stepped))]
                run.gradient = []
                return messages.StepResult(metrics={})
            case messages.SaveState(model_id=model_id, directory=directory):
                self.disk[name_of(directory)] = self._run_of(model_id).copy()
                return messages.StateResult(seconds=self.save_seconds)
            case messages.LoadState(model_id=model_id, directory=directory):
                if name_of(directory) not in self.disk:
                    raise CheckpointError(f"{name_of(directory)} is missing")
                self._run_of(model_id)
                self.runs[model_id] = self.disk[name_of(directory)].copy()
            case messages.DropRun(model_id=model_id):
                self.runs.pop(model_id, None)
            case messages.PublishSampler(sampler_id=sampler_id) | messages.LoadSampler(sampler_id=sampler_id):
                self.samplers.add(sampler_id)
            case messages.DropSampler(sampler_id=sampler_id):
                self.samplers.discard(sampler_id)
            case _:
                raise EngineError(f"{command!r} is not simulated")
        return messages.StateResult()

    def _run_of(self, model_id: str) -> SimulatedRun:
        if model_id not in self.runs:
            raise InvalidInput(f"there is no run {model_id!r}")
        return self.runs[model_id]


def name_of(directory: str) -> str:
    return directory.rpartition("/")[2]
