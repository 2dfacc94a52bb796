"""Which frozen weights the engine holds: loads them when a sample needs them, lets the least recently used go."""

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from dataclasses import dataclass

from lorimer.engine import messages
from lorimer.errors import EngineDied, Gone
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.recorder import Recorder
from lorimer.store import weights
from lorimer.store.directory import DataDirectory

_MOST_NAMES = 10_000


@dataclass(eq=False)
class Held:
    """A sampler in the engine, or on its way there."""

    name: str
    ready: "asyncio.Future[messages.Result]"
    num_users: int = 0


class SamplerPool:
    """Samplers by the name of their weights' directory, which never stands for other weights."""

    def __init__(self, slot: EngineSlot, recorder: Recorder, directory: DataDirectory, most: int) -> None:
        self._slot, self._recorder, self._directory, self._most = slot, recorder, directory, most
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._names: dict[str, str] = {}
        """By the weights' id; weights never change their directory."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._held)

    async def hold(self, weights_id: str) -> Held:
        """Have the engine hold these weights until ``release``."""
        name = await self._name(weights_id)
        held = self._held.get(name)
        if held is None:
            self._make_room()
            held = self._held[name] = Held(name, self._load(name))
        self._held.move_to_end(name)
        held.num_users += 1
        try:
            await asyncio.wait([held.ready])
            held.ready.result()
        except BaseException:
            held.num_users -= 1
            if held.ready.done() and self._held.get(name) is held:  # it was not loaded; the next one may try again
                del self._held[name]
            raise
        return held

    def release(self, held: Held) -> None:
        held.num_users -= 1

    async def _name(self, weights_id: str) -> str:
        if weights_id not in self._names:
            found = await self._recorder.read(weights.get_weights, weights_id)
            if found is None:
                raise Gone("the weights of this sampler have been removed; make a new sampling client")
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            self._names[weights_id] = found.name
        return self._names[weights_id]

    def published(self, name: str) -> None:
        """The engine froze these weights itself."""
        done: asyncio.Future[messages.Result] = asyncio.get_running_loop().create_future()
        done.set_result(messages.StateResult())
        with contextlib.suppress(EngineDied):
            self._make_room()
            self._held[name] = Held(name, done)

    def engine_ended(self) -> None:
        self._held.clear()

    def _load(self, name: str) -> "asyncio.Future[messages.Result]":
        command = messages.LoadSampler(
            request_id=f"sampler:{next(self._numbers)}",
            sampler_id=name,
            directory=str(self._directory.weights / name),
        )
        return self._slot.submit(command)

    def _make_room(self) -> None:
        """Let go of unused samplers; if all are in use there is one more than wanted, until they are not."""
        unused = [name for name, held in self._held.items() if not held.num_users and held.ready.done()]
        for name in unused[: max(0, len(self._held) + 1 - self._most)]:
            self._slot.submit(messages.DropSampler(request_id=f"drop-sampler:{next(self._numbers)}", sampler_id=name))
            del self._held[name]
