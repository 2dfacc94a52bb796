"""Chooses the replica of a base model that computes a request, and lets runs move between replicas.

Replicas share nothing, so a run lives in one of them: the less loaded of two chosen at random. It stays there while the
replica holds it or has work for it; once evicted it is placed anew. Samples are placed by their weights, so that a
replica which holds them, and has computed the same prompt before, gets the next one too. A base model may also have
sampler replicas, which compute samples only, by vLLM: they get what they can answer exactly (`vllm_lacks`). Full runs,
and samples of their weights, have replicas of their own.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import msgspec
from sqlalchemy import Connection

from lorimer import types
from lorimer.engine.config import TEMPERATURES, EngineConfig, VllmConfig
from lorimer.errors import Busy, Unsupported
from lorimer.scheduler.journal import Accept, Transaction
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.runs import Operation
from lorimer.store import futures, moves, runs
from lorimer.store.futures import FutureRow
from lorimer.store.weights import WeightsShape

PROMPT_TOKENS = 16
"""Samples of the base model are placed by their user and this many first tokens of their prompt."""
MAX_OVERLOAD, SLACK = 1.25, 8
"""A replica with more than this multiple of the mean number of samples, plus the slack, is passed over."""
_SAMPLER = "#sampler-"
_FULL = "#full-"
Kind = Literal["plain", "sampler", "full"]
"""What a replica computes: adapters, and samples of these and of the base; samples only; full runs, one at a time."""


@dataclass(frozen=True)
class Load:
    """How busy a replica is."""

    num_runs: int = 0
    """Runs in the engine, or with work for it."""
    max_runs: int = 1
    num_samples: int = 0
    open_bytes: int = 0
    """Bytes of its unfinished operations."""
    is_usable: bool = True
    """Its engine is ready, or can be started; a sampler replica is ready."""

    @property
    def has_room(self) -> bool:
        return self.num_runs < self.max_runs


class Placeable(Protocol):
    @property
    def place(self) -> str: ...
    def load(self) -> Load: ...


R = TypeVar("R", bound=Placeable)


def replica_name(base_model: str, number: int) -> str:
    return f"{base_model}#{number}"


def sampler_name(base_model: str, number: int) -> str:
    return f"{base_model}{_SAMPLER}{number}"


def kind_of(place: str) -> Kind:
    """Return the kind of a replica. The name of a base model has no ``#``."""
    if _SAMPLER in place:
        return "sampler"
    return "full" if _FULL in place else "plain"


def is_sampler(place: str) -> bool:
    return kind_of(place) == "sampler"


def is_full(place: str) -> bool:
    return kind_of(place) == "full"


def is_plain(place: str) -> bool:
    return kind_of(place) == "plain"


def full_configs(models: Mapping[str, EngineConfig], number: int) -> dict[str, tuple[str, EngineConfig]]:
    """Return the base model and the engine of every replica for full runs, by its name.

    Their engines start when a run needs them, and end when it has been idle. They have as many ranks as the others of
    the base. A base that is quantised has none.
    """
    found: dict[str, tuple[str, EngineConfig]] = {}
    for name, config in models.items():
        full = msgspec.structs.replace(config, method="full", vllm=None, quantize="none")
        for each in range(number if config.quantize == "none" else 0):
            index = config.device_index + each * config.ranks
            found[f"{name}{_FULL}{each}"] = name, msgspec.structs.replace(full, device_index=index)
    return found


def replica_configs(
    models: Mapping[str, EngineConfig], num_replicas: Mapping[str, int]
) -> dict[str, tuple[str, EngineConfig]]:
    """Return the base model and the engine of every replica, by its name. Each has devices of its own."""
    found: dict[str, tuple[str, EngineConfig]] = {}
    for name, config in models.items():
        engine, sampler = (msgspec.structs.replace(config, **kind) for kind in ({"vllm": None}, {"ranks": 1}))
        places = {replica_name(name, number): engine for number in range(num_replicas.get(name, 1))}
        for number in range(0 if config.vllm is None else config.vllm.replicas):
            places[sampler_name(name, number)] = sampler
        index = 0
        for place, chosen in places.items():
            found[place] = name, msgspec.structs.replace(chosen, device_index=index)
            index += chosen.num_devices
    return found


def choose_for_run(replicas: Sequence[R], chance: random.Random) -> R:
    """Return the less loaded of two random replicas, preferring usable ones with room."""
    loads = {replica.place: replica.load() for replica in replicas}
    for wanted in (lambda load: load.is_usable and load.has_room, lambda load: load.is_usable, lambda load: True):
        if found := [replica for replica in replicas if wanted(loads[replica.place])]:
            two = chance.sample(found, min(2, len(found)))
            return min(two, key=lambda replica: loads[replica.place].num_runs)
    raise LookupError("there is no replica")


def choose_for_sample(replicas: Sequence[R], key: str) -> R:
    """Return the first replica in the order of the key's rendezvous hash that is usable and not overloaded."""
    loads = {replica.place: replica.load() for replica in replicas}
    usable = [replica for replica in replicas if loads[replica.place].is_usable] or list(replicas)
    limit = MAX_OVERLOAD * sum(loads[replica.place].num_samples for replica in usable) / len(usable) + SLACK
    order = sorted(usable, key=lambda replica: _score(key, replica.place))
    return next((replica for replica in order if loads[replica.place].num_samples <= limit), order[0])


def sample_key(user_id: str, weights_id: str | None, prompt: types.ModelInput) -> str:
    """Return what decides where a sample is computed."""
    if weights_id is not None:
        return weights_id
    first = prompt.chunks[0] if prompt.chunks else None
    tokens = list(first.tokens[:PROMPT_TOKENS]) if isinstance(first, types.EncodedTextChunk) else []
    return f"{user_id}:{tokens}"


def vllm_lacks(
    request: types.SampleRequest,
    vllm: VllmConfig,
    *,
    shape: WeightsShape | None,
    has_seed: bool,
    grammar: str = "",
) -> str | None:
    """Return the name of what vLLM cannot do exactly as the engine does; None if it can answer all of a request.

    ``shape`` is that of the sampled weights, None for the base. ``has_seed``: the client chose the seed.
    """
    params = request.sampling_params
    needs = {
        "temperature": params.temperature != 0 and not TEMPERATURES[0] <= params.temperature <= TEMPERATURES[1],
        # vLLM's logprobs are those of the distribution that these have cut, ours those of the whole one.
        "top_k": params.top_k > 0,
        "top_p": params.top_p < 1,
        # It gets no seeds: its draws would depend on the batch, and on a CPU vLLM 0.32 dies of a seed.
        "seed": has_seed and not vllm.ignore_seeds,
        # It scores prompts with the unembedding factors of other requests in the batch.
        "prompt_logprobs": bool(request.prompt_logprobs),
        "topk_prompt_logprobs": request.topk_prompt_logprobs > 0,
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k > 0,
        "grammar": bool(grammar),
        "images": any(isinstance(chunk, types.ImageChunk) for chunk in request.prompt.chunks),
        "rank": shape is not None and shape.rank > vllm.max_lora_rank,
        "use_dora": shape is not None and shape.use_dora,
    }
    return next((name for name, is_needed in needs.items() if is_needed), None)


def able_to_sample(
    engines: Sequence[R], samplers: Sequence[R], lacks: str | None, config: EngineConfig, request: types.SampleRequest
) -> list[R]:
    """Return the samplers if they are ready and lack nothing, or else the engines, if these decode."""
    is_decoding = config.ranks == 1
    if lacks is None:
        ready = [sampler for sampler in samplers if sampler.load().is_usable]
        return ready or list(engines if is_decoding else samplers)
    if not is_decoding and request.sampling_params.max_tokens != 1:
        raise Unsupported(
            f"the sample needs {lacks!r}, which vLLM does not compute exactly, and the engine of {config.model!r} has"
            f" {config.ranks} ranks, which only score prompts (max_tokens 1)"
        )
    return list(engines)


def _score(key: str, place: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{place}".encode(), digest_size=8).digest()


@dataclass(frozen=True, eq=False)
class AcceptAt(Transaction):
    """Accept an operation for the replica that holds its run. A run that none holds goes to the operation's replica.

    The row of the run stays locked, so that its owner cannot release the run meanwhile.
    """

    operation: Operation
    limits: SchedulerLimits

    def apply(self, c: Connection) -> tuple[FutureRow, bool]:
        operation = self.operation
        assert operation.place is not None
        moves.place_free(c, operation.lane, operation.place)
        operation.place = runs.lock(c, operation.lane, is_shared=True)
        found = Accept(operation, max_stored_bytes=self.limits.max_stored_bytes).apply(c)
        if found[1] and futures.num_unfinished(c, operation.lane) > self.limits.max_open_operations:
            raise Busy(
                f"run {operation.lane} has {self.limits.max_open_operations} unfinished operations; wait for some"
            )
        return found


@dataclass(frozen=True, eq=False)
class Release(Transaction):
    """Let any replica take a run that this one evicted. Return False if operations for it are queued here."""

    model_id: str
    place: str

    def apply(self, c: Connection) -> bool:
        runs.lock(c, self.model_id)
        if futures.has_unfinished(c, self.model_id):
            return False
        runs.release(c, self.model_id, self.place)
        return True
