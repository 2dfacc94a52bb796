"""The kinds of training that ``lorimer train`` has: which settings each takes, and the loop's configuration from them.

Settings are the plain fields of the loop's own configuration and of a dataclass here, which says what the data are.
``open_job`` reads the data and builds the configuration; the loops do the rest.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lorimer import ServiceClient
from lorimer.chat.conversation import Message
from lorimer.cookbook import distillation, preference, supervised
from lorimer.cookbook.datasets import (
    Row,
    ShuffledDataset,
    check_conversations,
    convert_rows,
    datum_maker,
    load_rows,
    read_question,
    split_off,
)
from lorimer.cookbook.hyperparams import lora_learning_rate
from lorimer.cookbook.progress import say
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.rl import training as rl
from lorimer.cookbook.rl.problems import ProblemDataset
from lorimer.cookbook.service import get_tokenizer
from lorimer.cookbook.train.config_file import Schema, Setting, object_schema, settings_of
from lorimer.cookbook.train.eval_settings import make_evaluators
from lorimer.cookbook.train.inputs import DistillData, DpoData, FileRows, RlData, SftData
from lorimer.cookbook.train.tasks import open_grading, task_rows
from lorimer.errors import InvalidInput
from lorimer.types.paths import SCHEME

Name = Literal["sft", "rl", "dpo", "distill", "full"]
LoopConfig = supervised.Config | preference.Config | distillation.Config | rl.Config


@dataclass(frozen=True)
class Job:
    """A training that is ready to start."""

    config: LoopConfig
    train: Callable[[Any, ServiceClient], Awaitable[Any]]
    num_examples: int
    num_held_out: int


@dataclass(frozen=True)
class Kind:
    """``config`` and ``data`` are dataclasses, whose plain fields are the settings, except for those ``built`` here."""

    title: str
    config: type
    data: type
    open: Callable[["Given", ServiceClient], Any]
    built: tuple[str, ...] = ()
    steps: str = "max_steps"
    """The setting that limits the number of steps."""
    rate_factor: float | None = 1.0
    """What the LoRA rule is multiplied with where no learning rate is given; ``None`` takes the class's default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that this kind decides."""

    @property
    def settings(self) -> dict[str, Setting]:
        found = settings_of(self.data, self.config)
        return {name: setting for name, setting in found.items() if name not in (*self.built, *self.fixed)}

    @property
    def needed(self) -> list[str]:
        """Return the settings that have neither a default nor a rule."""
        ruled = ("log_dir", "learning_rate") if self.rate_factor else ("log_dir",)
        return [name for name, setting in self.settings.items() if setting.is_needed and name not in ruled]

    def schema(self, name: str) -> Schema:
        """Return the JSON schema of a file of settings."""
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"lorimer train {name}"}
        return head | {"description": self.title} | object_schema(self.settings, self.needed)


@dataclass(frozen=True)
class Given:
    """The settings of a training, complete and checked."""

    name: Name
    values: Mapping[str, Any]

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def data(self) -> Any:
        return self.kind.data(**self._of(self.kind.data))

    def config(self, **built: Any) -> Any:
        return self.kind.config(**self._of(self.kind.config), **built)

    def _of(self, cls: type) -> dict[str, Any]:
        names = {field.name for field in fields(cls)}
        return {name: value for name, value in self.values.items() if name in names}


def complete(name: Name, values: Mapping[str, Any]) -> Given:
    """Return the settings of a training; refuse to go on without those that have no default."""
    kind = KINDS[name]
    if missing := [one for one in kind.needed if values.get(one) is None]:
        raise InvalidInput(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed, in the file or by a flag"
        )
    given = Given(name, {"log_dir": Path("runs") / name} | dict(values) | dict(kind.fixed))
    given.data()  # refuses what does not fit together before a server is looked for
    return given


@asynccontextmanager
async def open_job(given: Given, service: ServiceClient) -> AsyncIterator[Job]:
    """Read the data, choose a learning rate if there is none, and build the loop's configuration."""
    kind, values = given.kind, dict(given.values)
    if kind.rate_factor and values.get("learning_rate") is None:
        directory = get_tokenizer(service, given["base_model"]).name_or_path
        rule = lora_learning_rate(given["base_model"], directory=directory, is_full=values.get("method") == "full")
        values["learning_rate"] = rule.value * kind.rate_factor
        part = "" if kind.rate_factor == 1 else f"; {kind.rate_factor:g} of it is taken, as rewards are noisier"
        say(f"{rule}{part}")
    async with kind.open(Given(given.name, values), service) as job:
        yield job


# ── data and configurations ───────────────────────────────────────────────────────────────────────────


def _split(data: FileRows, rows: Sequence[Row], seed: int) -> tuple[Sequence[Row], Sequence[Row]]:
    if data.held_out_data is not None:
        return rows, load_rows(data.held_out_data)
    return split_off(rows, data.num_held_out, seed)


def _notes(data: Any, *left_out: str) -> dict[str, Any]:
    """Return what the rows were made from, with the content of files, for a run that is resumed."""
    notes = {
        name: value
        for name, value in asdict(data).items()
        if name not in left_out and not name.startswith("eval_")  # what is measured may change
    }
    for name in ("data", "held_out_data"):
        if notes.get(name) and (path := Path(notes[name])).is_file():
            notes[f"{name}_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return notes


def _renderer(given: Given, service: ServiceClient) -> Renderer:
    name = given.values.get("renderer_name", "auto")
    return get_renderer(name, get_tokenizer(service, given["base_model"]))


def _dataset(given: Given, data: FileRows, rows: Sequence[Any], convert: Callable[[Any], Sequence[Any]]) -> Any:
    seed = given.values.get("seed", 0)
    dataset: ShuffledDataset[Any] = ShuffledDataset(
        rows, data.batch_size, convert=convert, num_epochs=data.epochs, seed=seed
    )
    if advice := dataset.length_advice(given.values.get("max_steps")):
        say(advice.replace("--epochs ", "epochs = "))
    return dataset


@asynccontextmanager
async def _open_sft(given: Given, service: ServiceClient) -> AsyncIterator[Job]:
    data: SftData = given.data()
    seed = given.values.get("seed", 0)
    rows, held_out = _split(data, check_conversations(load_rows(data.data)), seed)
    renderer = _renderer(given, service)
    convert = datum_maker(renderer, max_length=data.max_length, train_on=data.train_on, reduction=data.reduction)
    test_data = [datum for row in check_conversations(held_out) for datum in convert(row)]
    dataset = _dataset(given, data, rows, convert)
    evaluators = make_evaluators(data, renderer, seed)
    config = given.config(dataset=dataset, test_data=test_data, evaluators=evaluators, notes=_notes(data))
    yield Job(config, supervised.train, len(rows), len(held_out))


@asynccontextmanager
async def _open_dpo(given: Given, service: ServiceClient) -> AsyncIterator[Job]:
    data: DpoData = given.data()
    seed = given.values.get("seed", 0)
    rows, held_out = _split(data, load_rows(data.data), seed)
    renderer = _renderer(given, service)
    make = preference.dpo_pair if given.values.get("kind", "dpo") == "dpo" else preference.reward_pair
    pairs, test_pairs = (
        convert_rows(part, lambda row: make(row, renderer, data.max_length)) for part in (rows, held_out)
    )
    dataset = _dataset(given, data, pairs, lambda pair: [pair])
    evaluators = make_evaluators(data, renderer, seed)
    config = given.config(dataset=dataset, test_pairs=test_pairs, evaluators=evaluators, notes=_notes(data))
    yield Job(config, preference.train, len(pairs), len(test_pairs))


@asynccontextmanager
async def _open_distill(given: Given, service: ServiceClient) -> AsyncIterator[Job]:
    data: DistillData = given.data()
    renderer = _renderer(given, service)
    rules: list[Message] = [{"role": "system", "content": data.teacher_prompt}] if data.teacher_prompt else []

    def prompt(row: Row) -> distillation.Prompt:
        asked = read_question(row)
        of_teacher = renderer.build_generation_prompt([*rules, *asked]) if rules else None
        return distillation.Prompt(renderer.build_generation_prompt(asked), of_teacher)

    seed = given.values.get("seed", 0)
    rows, held_out = _split(data, load_rows(data.data), seed)
    prompts, test_prompts = (convert_rows(part, prompt) for part in (rows, held_out))
    stop = renderer.get_stop_sequences()
    path = given.values.get("teacher_path")
    if path is not None and not path.startswith(SCHEME):
        raise InvalidInput(
            f"teacher_path is {path!r}; a tinker:// path is accepted, and teacher_model names a base model"
        )
    base_model = None if path else given.values.get("teacher_model") or given["base_model"]
    teacher = await service.create_sampling_client_async(path, base_model=base_model)
    measure = distillation.reverse_kl(teacher, test_prompts, stop, given["max_tokens"])
    config = given.config(
        dataset=_dataset(given, data, prompts, lambda one: [one]),
        stop=stop,
        evaluators=[*([measure] if test_prompts else []), *make_evaluators(data, renderer, seed)],
        notes=_notes(data),
    )
    yield Job(config, distillation.train, len(prompts), len(test_prompts))


@asynccontextmanager
async def _open_rl(given: Given, service: ServiceClient) -> AsyncIterator[Job]:
    data: RlData = given.data()
    seed = given.values.get("seed", 0)
    rows, held_out = task_rows(data, seed)
    async with open_grading(data) as grading:

        def make_datasets(renderer: Renderer) -> Any:
            make = partial(ProblemDataset, make_env=partial(grading.make_env, renderer))
            learned = make(
                rows, batch_size=data.batch_size, group_size=data.group_size, num_epochs=data.epochs, seed=seed
            )
            return learned, make(held_out, batch_size=len(held_out), group_size=1) if held_out else None

        config = given.config(
            dataset_builder=make_datasets,
            extra_metrics=[grading.take_metrics],
            evaluators=make_evaluators(data, _renderer(given, service), seed),
            notes=_notes(data, "graders", "grader_workers", "grader_seconds"),
        )
        yield Job(config, rl.train, len(rows), len(held_out))


KINDS: dict[Name, Kind] = {
    "sft": Kind("Supervised fine-tuning on conversations.", supervised.Config, SftData, _open_sft),
    "rl": Kind(
        "Reinforcement learning on questions whose answers are graded.",
        rl.Config,
        RlData,
        _open_rl,
        steps="num_steps",
        rate_factor=0.2,
    ),
    "dpo": Kind("Preference pairs: DPO, or a reward model.", preference.Config, DpoData, _open_dpo, rate_factor=None),
    "distill": Kind(
        "On-policy distillation: the student samples, and a teacher scores each token.",
        distillation.Config,
        DistillData,
        _open_distill,
        built=("stop",),
        rate_factor=None,
    ),
    "full": Kind(
        "Supervised fine-tuning of all weights of the model, instead of an adapter.",
        supervised.Config,
        SftData,
        _open_sft,
        fixed={"method": "full"},
        built=("rank",),
    ),
}
