"""Which weights a name means: a ``tinker://`` path, a run with ``@step``, or a base model; and opens them."""

from dataclasses import dataclass

import lorimer
from lorimer import RestClient, ServiceClient
from lorimer.cookbook.evals.eval_tasks import Model
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput
from lorimer.types import Checkpoint
from lorimer.types.paths import SCHEME, parse_path


@dataclass(frozen=True)
class NamedModel:
    name: str
    """A ``tinker://`` path or a base model, by which results are stored."""
    identity: str
    """Changes when other weights get the name, so that an evaluation of the old ones is not resumed."""

    @property
    def is_checkpoint(self) -> bool:
        return self.name.startswith(SCHEME)


async def find_model(service: ServiceClient, text: str) -> NamedModel:
    """Return the model that a user means. Refuse a name that is not there, with those that are."""
    rest = service.create_rest_client()
    if text.startswith(SCHEME):
        run_id = parse_path(text).training_run_id
        listed = (await rest.list_checkpoints_async(run_id)).checkpoints
        found = next((one for one in listed if one.tinker_path == text), None)
        if found is None:
            raise InvalidInput(f"there is no checkpoint {text!r}; `lorimer checkpoint list` shows yours")
        return _of_checkpoint(found)
    served = [str(one.model_name) for one in (await service.get_server_capabilities_async()).supported_models]
    if text in served:
        return NamedModel(text, text)
    run, at, place = text.rpartition("@")
    if at:
        return _of_checkpoint(await find_checkpoint(rest, run, place))
    if rest.holder.is_local and len(served) == 1:
        return NamedModel(served[0], text)  # a directory or file that this process serves under a name of its own
    raise InvalidInput(
        f"{text!r} is not a model; accepted are {', '.join(served)}, tinker:// paths, and RUN@STEP or RUN@last"
    )


def _of_checkpoint(found: Checkpoint) -> NamedModel:
    return NamedModel(found.tinker_path, f"{found.tinker_path} {found.time.isoformat()}")


async def find_checkpoint(rest: RestClient, run: str, place: str) -> Checkpoint:
    """Return the newest checkpoint of a run at a step, of a name, or with ``last`` of all; one for sampling first."""
    run_id = await find_run(rest, run)
    parts = (await rest.get_run_async(run_id)).parts
    found = [one for part in parts for one in (await rest.list_checkpoints_async(part.training_run_id)).checkpoints]
    found = [one for one in found if one.checkpoint_type != "external"]
    found.sort(key=lambda one: (one.checkpoint_type == "sampler", one.time), reverse=True)
    named = [one for one in found if one.checkpoint_id.partition("/")[2] == place]
    at_step = [one for one in found if place.isdecimal() and one.step == int(place)]
    if chosen := found if place == "last" else named or at_step:
        if place == "last":
            newest = max(one.step or 0 for one in chosen)
            chosen = [one for one in chosen if (one.step or 0) == newest]
        return chosen[0]
    steps = sorted({one.step for one in found if one.step is not None})
    raise InvalidInput(
        f"run {run!r} has no checkpoint {place!r}; it has {', '.join(map(str, steps)) or 'none'}"
        f"{' as steps' if steps else ''}, and 'last' is accepted"
    )


async def find_run(rest: RestClient, text: str) -> str:
    """Return the id of a run by its id, or by its name if only one run has it."""
    if ":train:" in text:
        return text
    quoted = text.replace('"', "")
    found = await rest.list_runs_async(f'name="{quoted}"', archived="any", limit=2)
    if found.total_count != 1:
        problem = f"{found.total_count} runs are" if found.total_count else "no run is"
        raise InvalidInput(f"{problem} called {text!r}; the id of a run, or a name that one run has, is accepted")
    return found.runs[0].run_id


async def open_model(service: ServiceClient, named: NamedModel, renderer_name: str = "auto") -> Model:
    """Return a model to sample from, with the renderer of its base."""
    if named.is_checkpoint:
        client: lorimer.SamplingClient = await service.create_sampling_client_async(model_path=named.name)
    else:
        client = await service.create_sampling_client_async(base_model=named.name)
    base_model = await client.get_base_model_async()
    return Model(client, get_renderer(renderer_name, get_tokenizer(service, base_model)))
