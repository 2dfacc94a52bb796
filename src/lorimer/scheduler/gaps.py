"""Numbers that never arrive: after a time those that wait behind them are failed, and the run goes on."""

import asyncio
from collections.abc import Callable, Iterable

from lorimer.scheduler import records
from lorimer.scheduler.background import Background
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.runs import RunState


class Gaps:
    def __init__(
        self,
        seconds: float,
        recorder: Recorder,
        background: Background,
        *,
        forget: Callable[[RunState, Operation], None],
        on_closed: Callable[[], None],
    ) -> None:
        """``forget`` is told of each operation that was failed, ``on_closed`` when its run can go on."""
        self._seconds, self._recorder, self._background = seconds, recorder, background
        self._forget, self._on_closed = forget, on_closed
        self._is_closing = False

    def watch(self, state: RunState) -> None:
        """Set or clear the clock of a run; called when its order may have changed."""
        missing = state.lane.missing if state.lane is not None else None
        if missing is None and state.gap is not None:
            state.gap.cancel()
            state.gap = None
        elif missing is not None and state.gap is None and not self._is_closing:
            state.gap = asyncio.get_running_loop().call_later(self._seconds, self._close, state, missing)

    def stop(self, states: Iterable[RunState]) -> None:
        """Close no more gaps."""
        self._is_closing = True
        for state in states:
            if state.gap is not None:
                state.gap.cancel()

    def _close(self, state: RunState, missing: int) -> None:
        state.gap = None
        lane = state.lane
        if lane is None or lane.missing is None:
            return
        gaps = lane.gaps()
        is_coming = any(first <= seq <= last for first, last in gaps for seq in state.operations)
        if lane.missing != missing or is_coming:  # that one came, or is just being put on record
            self.watch(state)
            return
        numbers = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in gaps[:8])
        reason = (
            f"operation {numbers} of run {state.model_id} never arrived; those after it were given up after "
            f"{self._seconds:.0f} s. Submit them again, with new numbers"
        )
        self._background.record(state, self._abandon(state, gaps, lane.held(), reason))

    async def _abandon(
        self, state: RunState, gaps: list[tuple[int, int]], waiting: list[Operation], reason: str
    ) -> None:
        """On record first: were the order to go on before, a replay would wait for the lost numbers again."""
        outcomes = await self._recorder.write(records.abandon, state.run, gaps, waiting, reason)
        if state.lane is not None:
            state.lane.give_up(gaps, waiting)
        for operation, outcome in zip(waiting, outcomes, strict=True):
            self._recorder.settle(operation, outcome)
            self._forget(state, operation)
        self.watch(state)
        self._on_closed()
