"""Trainings that run in processes of the server, and a look at data before one; ours alone.

A server offers them where its operator allows it (``trainings``); ``lorimer train`` runs the same loops anywhere.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

from lorimer.client.admin import Caller
from lorimer.types.base import validate
from lorimer.types.trainings import (
    CheckDataRequest,
    DataCheckResponse,
    DataForm,
    StartTrainingRequest,
    Training,
    TrainingDetails,
    TrainingKind,
    TrainingKindsResponse,
    TrainingsResponse,
)

CHECK_SECONDS = 180.0


def training_path(training_id: str) -> str:
    return f"/trainings/{quote(training_id, safe='')}"


class TrainingsClient(Caller):
    """``data`` and ``held_out_data`` are texts of JSONL files; the server reads no files of its own."""

    def start_training(
        self,
        kind: TrainingKind | str,
        settings: Mapping[str, Any],
        *,
        data: str | None = None,
        held_out_data: str | None = None,
        dry_run: bool = False,
    ) -> "Future[Training]":
        """Start a training on the server: a kind of ``lorimer train`` with its settings, or ``recipe:NAME``."""
        given = {"kind": kind, "settings": dict(settings), "data": data, "held_out_data": held_out_data}
        body = validate(StartTrainingRequest, given | {"dry_run": dry_run})
        return self._start("start_training", Training, "POST", "/trainings", body)

    async def start_training_async(
        self,
        kind: TrainingKind | str,
        settings: Mapping[str, Any],
        *,
        data: str | None = None,
        held_out_data: str | None = None,
        dry_run: bool = False,
    ) -> Training:
        return await self._wait(
            self.start_training(kind, settings, data=data, held_out_data=held_out_data, dry_run=dry_run)
        )

    def list_trainings(self, *, limit: int = 50, offset: int = 0) -> "Future[TrainingsResponse]":
        """Return the newest trainings of the caller."""
        query = {"limit": limit, "offset": offset}
        return self._start("list_trainings", TrainingsResponse, "GET", "/trainings", query=query)

    async def list_trainings_async(self, *, limit: int = 50, offset: int = 0) -> TrainingsResponse:
        return await self._wait(self.list_trainings(limit=limit, offset=offset))

    def get_training(self, training_id: str) -> "Future[TrainingDetails]":
        """Return a training with the end of its output."""
        return self._start("get_training", TrainingDetails, "GET", training_path(training_id))

    async def get_training_async(self, training_id: str) -> TrainingDetails:
        return await self._wait(self.get_training(training_id))

    def stop_training(self, training_id: str) -> "Future[Training]":
        """Stop a training so that it can be resumed, and wait until its process has ended."""
        return self._start("stop_training", Training, "POST", training_path(training_id) + "/stop")

    async def stop_training_async(self, training_id: str) -> Training:
        return await self._wait(self.stop_training(training_id))

    def resume_training(self, training_id: str) -> "Future[Training]":
        """Start a training again that was stopped, interrupted or has failed, at its last checkpoint."""
        return self._start("resume_training", Training, "POST", training_path(training_id) + "/resume")

    async def resume_training_async(self, training_id: str) -> Training:
        return await self._wait(self.resume_training(training_id))

    def delete_training(self, training_id: str) -> "Future[None]":
        """Delete a training that does not run, with its data and output; its run and checkpoints stay."""
        return self._do("delete_training", "DELETE", training_path(training_id))

    async def delete_training_async(self, training_id: str) -> None:
        await self._wait(self.delete_training(training_id))

    def list_training_kinds(self) -> "Future[TrainingKindsResponse]":
        """Return the schemas of the settings of each kind, and whether the server starts trainings."""
        return self._start("list_training_kinds", TrainingKindsResponse, "GET", "/training_kinds")

    async def list_training_kinds_async(self) -> TrainingKindsResponse:
        return await self._wait(self.list_training_kinds())

    def check_data(
        self,
        model: str,
        data: str,
        *,
        held_out_data: str | None = None,
        form: DataForm | None = None,
        max_length: int = 1024,
        num_shown: int = 3,
        **options: Any,
    ) -> "Future[DataCheckResponse]":
        """Check rows as ``lorimer data check`` does; ``options`` are the other fields of ``CheckDataRequest``."""
        given = {"model": model, "data": data, "held_out_data": held_out_data, "form": form}
        more = {"max_length": max_length, "num_shown": num_shown}
        body = validate(CheckDataRequest, given | more | options)
        return self._start("check_data", DataCheckResponse, "POST", "/data/check", body)

    async def check_data_async(
        self,
        model: str,
        data: str,
        *,
        held_out_data: str | None = None,
        form: DataForm | None = None,
        max_length: int = 1024,
        num_shown: int = 3,
        **options: Any,
    ) -> DataCheckResponse:
        return await self._wait(
            self.check_data(
                model,
                data,
                held_out_data=held_out_data,
                form=form,
                max_length=max_length,
                num_shown=num_shown,
                **options,
            )
        )
