"""One base model with its runs and samplers, and the effect of each command on them.

The worker (``worker.py``) receives commands from a socket and decides when to run them; tests and the benchmark call
the engine directly. A command succeeds completely, or raises and changes nothing.
"""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from lorimer.engine.adapters import checkpoints
from lorimer.engine.adapters.adapters import Adapter, FrozenAdapter, create_adapter, freeze, snapshot
from lorimer.engine.config import EngineConfig
from lorimer.engine.full import checkpoints as full_checkpoints
from lorimer.engine.full.full_run import FullRun, PublishedWeights, apply_step, create_full_run, publish
from lorimer.engine.full.memory_need import reserve_memory, room_for_copy
from lorimer.engine.full.sampling import FullSampler
from lorimer.engine.full.snapshots import save_snapshot
from lorimer.engine.messages import (
    CreateRun,
    Done,
    DropRun,
    DropSampler,
    EncodedForwardBackward,
    Failed,
    ForwardBackward,
    LoadSampler,
    LoadState,
    ModelInfo,
    OptimStep,
    PublishSampler,
    RegisterLoss,
    SampleRequest,
    SampleResult,
    SaveState,
    StateResult,
    Status,
    StepResult,
    TrainResult,
)
from lorimer.engine.model.base_model import eos_token_ids, load_model, load_tokenizer
from lorimer.engine.model.device import Device, open_device, return_freed_memory, used_bytes
from lorimer.engine.model.memory import choose_token_budget, count_fitting_dora_tokens, count_fitting_tokens
from lorimer.engine.model.vision import ReadImage, SequenceImages
from lorimer.engine.sampling.sampler import Sampler
from lorimer.engine.sharding import ALONE, Shards
from lorimer.engine.training import optim
from lorimer.engine.training.custom_loss import CustomLoss
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.engine.translation import decode_operation
from lorimer.engine.validation import check_operation, check_sample
from lorimer.errors import InvalidInput, NotFound, Unsupported
from lorimer.models.sources import resolve

Progress = Callable[[str, float | None], None]

_TRAINING_SHARE, _SAMPLING_SHARE = 0.6, 0.3
"""Shares of the memory besides the base weights; the rest is for adapters and their optimisers."""


def settle(config: EngineConfig, progress: Progress) -> EngineConfig:
    """Return the settings of all ranks, with what each would choose for itself; the model is then on this machine."""
    resolve(config.model, cache_directory=_cache(config), progress=progress)
    dtype = str(open_device(config).dtype).removeprefix("torch.")
    seed = secrets.randbits(63) if config.seed is None else config.seed
    return msgspec.structs.replace(config, dtype=dtype, seed=seed)


def _cache(config: EngineConfig) -> Path | None:
    return Path(config.cache_directory) if config.cache_directory else None


class Engine:
    def __init__(self, config: EngineConfig, progress: Progress | None = None, shards: Shards = ALONE) -> None:
        """With ``shards``, be one of the ranks of an engine; all of them execute the same commands."""
        self.shards = shards
        self._is_full = config.method == "full"
        report = progress or (lambda stage, fraction: None)
        with shards.agreed():
            device, memory = self._load(config, report)
        if not shards.is_alone:
            # All ranks make the same passes, so they plan with the same memory.
            memory = min(int(part) for part in shards.exchange(b"%d" % memory))
        with shards.agreed():
            # A budget that was set also says how much is kept.
            is_set = config.token_budget > 0
            room = int(_TRAINING_SHARE * memory)
            fitting = 0 if is_set else count_fitting_tokens(self.model, room)
            fitting_dora = count_fitting_dora_tokens(self.model, room, fitting)
            budget = config.token_budget or choose_token_budget(fitting, device, self._is_full)
            if not shards.is_alone:
                self._shard(device, report)
        return_freed_memory()
        self.trainer = Trainer(self.model, budget, fitting, fitting_dora)
        new_seed = secrets.randbits if config.seed is None else random.Random(config.seed).getrandbits

        def new_sampler() -> Sampler:
            size = int(_SAMPLING_SHARE * memory)
            return Sampler(self.model, self.tokenizer, self._eos, size, config.max_sampling_rows, new_seed)

        self.sampler = FullSampler(self.model, new_sampler) if self._is_full else new_sampler()
        self._new_seed = new_seed
        self._runs: dict[str, Adapter | FullRun] = {}
        self._is_base = True
        """Whether the model still has the weights of the base; a full run changes them."""
        self._samplers: dict[str, tuple[int, FrozenAdapter | PublishedWeights]] = {}
        """Number and weights by name. A name may be reused for other weights; a number never is."""
        self._num_frozen = 0

    def _load(self, config: EngineConfig, report: Progress) -> tuple[Device, int]:
        """Load the model and its tokenizer; return its device, and the memory there is for anything else."""
        shards = self.shards
        source = resolve(config.model, cache_directory=_cache(config), progress=report)
        report("choosing device and precision", None)
        device = open_device(config, shards.rank)
        # A base that is shared may not fit into one device: it is loaded and checked on the CPU.
        first = device if shards.is_alone else Device(torch.device("cpu"), device.dtype, device.memory_bytes)
        self._reservation, loading = reserve_memory(
            source.name, source.directory, first, device.handle, self._is_full, shards.size
        )
        self._state_bytes = self._reservation.outstanding
        report(f"loading {source.name}", None)
        used_before = used_bytes(device.handle)
        self.model = load_model(
            source.directory,
            first,
            source.name,
            config.max_image_pixels,
            not shards.is_alone,
            self._is_full,
            config.quantize,
        )
        limit = self.model.max_context
        if config.max_context > limit:
            raise InvalidInput(f"max_context {config.max_context} is more than the model's {limit}")
        self.model.max_context = config.max_context or limit
        self.tokenizer = load_tokenizer(source.directory)
        self._eos = eos_token_ids(source.directory, self.model.config, self.tokenizer)
        # The base weights were loaded into the memory that was free at start.
        self._reservation.loaded()
        loading.loaded()
        loaded = used_bytes(device.handle) - used_before
        used = loaded if shards.is_alone else self.model.sharded_bytes(shards.size)
        return device, max(0, (config.memory_bytes or max(0, device.memory_bytes - used)) - self._state_bytes)

    def _shard(self, device: Device, report: Progress) -> None:
        """Keep this rank's part of the base."""
        whole = self.model.local_bytes
        report("sharding the base", None)
        self.shards.join(device.handle)
        self.model.shard(self.shards, device)
        report(f"each of {self.shards.size} ranks has {self.model.local_bytes} of {whole} bytes of the base", None)

    @property
    def info(self) -> ModelInfo:
        model = self.model
        return ModelInfo(
            model_name=model.name,
            directory=model.directory,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            num_parameters=model.num_parameters,
            dtype=str(model.device.dtype).removeprefix("torch."),
            quantize=model.quantize,
            device=model.device.type,
            token_budget=self.trainer.token_budget,
            eos_token_ids=self._eos,
            target_modules=sorted({t.name.rpartition(".")[2] for t in model.targets}),
            no_images=model.no_images,
            kernels=model.kernels,
        )

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def create_run(self, command: CreateRun) -> StateResult:
        if command.model_id in self._runs:
            raise InvalidInput(f"run {command.model_id!r} exists already")
        optim.check_optimizer(command.optimizer)
        if self._is_full:
            self._runs[command.model_id] = self._create_full(command)
            return StateResult()
        lora = command.lora
        if lora is None:
            raise Unsupported("this engine trains adapters; full runs have engines of their own")
        if lora.seed is None:
            lora = msgspec.structs.replace(lora, seed=self._new_seed(63))
        self._runs[command.model_id] = create_adapter(
            self.model.targets, lora, command.optimizer, self.model.device.handle, self.model.rows
        )
        return StateResult()

    def _create_full(self, command: CreateRun) -> FullRun:
        if command.full is None:
            raise Unsupported("this engine trains full runs; adapters are trained by others")
        if self._runs:
            raise InvalidInput(f"run {next(iter(self._runs))!r} is in this engine, which holds one full run at a time")
        if not self._is_base:
            with self.shards.agreed():
                base = full_checkpoints.load_weights(self.model, Path(self.model.directory))
            full_checkpoints.replace_weights(self.model, base)
            self._is_base = True
        return create_full_run(self.model, command.full, command.optimizer)

    def train(
        self,
        operations: Sequence[ForwardBackward | EncodedForwardBackward],
        between_passes: Callable[[], None] | None = None,
    ) -> list[TrainResult | Exception]:
        """Compute operations together; each one that is refused or fails does so alone."""
        outcomes: list[TrainResult | Exception | None] = [None] * len(operations)
        batch: list[tuple[int, TrainItem]] = []
        for i, operation in enumerate(operations):
            try:
                if isinstance(operation, EncodedForwardBackward):
                    operation = decode_operation(operation)
                whole, images = self._read_images(operation)
                checked = check_operation(
                    whole,
                    vocab_size=self.model.vocab_size,
                    max_context=self.model.max_context,
                    custom_losses=self.trainer.custom_losses,
                )
                batch.append((i, TrainItem(checked, self._run(operation.model_id), images)))
            except Exception as error:
                outcomes[i] = error
        if not self.shards.is_alone:
            batch = self._agree_on(batch, outcomes)
        results = self.trainer.run([item for _, item in batch], between_passes) if batch else []
        self._count_taken()
        for (i, _), result in zip(batch, results, strict=True):
            outcomes[i] = result
        return [outcome for outcome in outcomes if outcome is not None]

    def _agree_on(
        self, batch: list[tuple[int, TrainItem]], outcomes: list[TrainResult | Exception | None]
    ) -> list[tuple[int, TrainItem]]:
        """Return the operations that no rank refuses; note the errors of the others in ``outcomes``."""
        verdicts = [self.shards.report(error) if isinstance(error, Exception) else None for error in outcomes]
        for i, verdict in enumerate(self.shards.agree(verdicts)):
            if verdict is not None and outcomes[i] is None:
                outcomes[i] = verdict.exception()
        return [(i, item) for i, item in batch if outcomes[i] is None]

    def _read_images(self, operation: ForwardBackward) -> tuple[ForwardBackward, list[SequenceImages | None]]:
        """Return the operation with placeholders of its images among its tokens, and the images of each datum."""
        if not any(datum.images for datum in operation.data):
            return operation, []
        known: dict[bytes, ReadImage] = {}
        data, images = [], []
        for index, datum in enumerate(operation.data):
            found = None
            if datum.images:
                where = f"data[{index}].model_input"
                found = self.model.vision.read(datum.tokens, datum.images, where, self.model.max_context, known)
                datum = msgspec.structs.replace(datum, tokens=found.tokens, images=[])
            data.append(datum)
            images.append(found)
        return msgspec.structs.replace(operation, data=data), images

    def optim_step(self, command: OptimStep) -> StepResult:
        run = self._run(command.model_id)
        if isinstance(run, FullRun):
            self._is_base = False
            metrics = apply_step(run, command.params)
            self._count_taken()
            return StepResult(metrics=metrics)
        return StepResult(metrics=optim.apply(run, command.params, self.model.device.product_dtype))

    def register_loss(self, command: RegisterLoss) -> StateResult:
        self.trainer.custom_losses[command.loss_id] = CustomLoss.parse(command.inputs, command.graph)
        return StateResult()

    def save_state(self, command: SaveState) -> StateResult:
        run, start = self._run(command.model_id), time.perf_counter()
        self._compare(command.model_id, run)
        size = 0
        if isinstance(run, FullRun):
            size = (
                save_snapshot(run, command.directory, command.shares_with)
                if command.is_snapshot
                else full_checkpoints.save(run, command.directory, weights_only=command.weights_only)
            )
        elif self.shards.rank == 0:
            size = checkpoints.save(
                run,
                self.model.targets,
                command.directory,
                base_model=self.model.name,
                weights_only=command.weights_only,
            )
        return StateResult(size_bytes=size, step=run.step, seconds=time.perf_counter() - start)

    def _compare(self, model_id: str, run: Adapter | FullRun) -> None:
        """End the engine if ranks differ in what all of them have: an adapter, or the step of a full run."""
        tensors = [torch.tensor([run.step])] if isinstance(run, FullRun) else run.tensors()
        self.shards.compare(f"the state of run {model_id!r}", tensors)

    def load_state(self, command: LoadState) -> StateResult:
        run, start = self._run(command.model_id), time.perf_counter()
        if isinstance(run, FullRun):
            self._is_base = False
            full_checkpoints.load(run, command.directory, optimizer=command.optimizer)
            self._count_taken()
        else:
            checkpoints.load(run, self.model.targets, command.directory, optimizer=command.optimizer)
        return StateResult(step=run.step, seconds=time.perf_counter() - start)

    def drop_run(self, command: DropRun) -> StateResult:
        self._run(command.model_id)
        del self._runs[command.model_id]
        self._count_taken()
        return StateResult()

    def _count_taken(self) -> None:
        """Reserve what gradient and optimiser of a full run, this one or the next, have not taken yet."""
        taken = sum(run.memory_bytes for run in self._runs.values() if isinstance(run, FullRun))
        self._reservation.set_outstanding(max(0, self._state_bytes - taken))

    def _run(self, model_id: str) -> Adapter | FullRun:
        if model_id not in self._runs:
            raise NotFound(f"there is no run {model_id!r}")
        return self._runs[model_id]

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────────

    def publish_sampler(self, command: PublishSampler) -> StateResult:
        run = self._run(command.model_id)
        self._refuse_full_samples()
        self._compare(command.model_id, run)
        self._add_sampler(command.sampler_id, lambda: self._publish(run))
        return StateResult(step=run.step)

    def _refuse_full_samples(self) -> None:
        if self._is_full and not self.shards.is_alone:
            raise Unsupported(
                f"full runs of {self.model.name!r} are trained by {self.shards.size} ranks, which would gather the"
                " model for each token, so they do not sample: save the weights (save_weights_for_sampler), download"
                " them, and serve the directory as a base model"
            )

    def load_sampler(self, command: LoadSampler) -> StateResult:
        self._refuse_full_samples()
        self._add_sampler(command.sampler_id, lambda: self._load_frozen(command.directory))
        return StateResult()

    def _publish(self, run: Adapter | FullRun) -> FrozenAdapter | PublishedWeights:
        if isinstance(run, Adapter):
            return snapshot(run, self.model.device.dtype)
        what, is_averaged = "a copy of the weights for sampling", run.has_average
        with room_for_copy(what, self._reservation, self.model, is_averaged):
            return publish(run)

    def _load_frozen(self, directory: str) -> FrozenAdapter | PublishedWeights:
        if self._is_full:
            with room_for_copy("sampling from saved weights", self._reservation, self.model):
                return PublishedWeights(full_checkpoints.load_published(self.model, directory))
        config = checkpoints.read_config(directory)
        weights = checkpoints.load_weights(directory, self.model.targets, config)
        on = self.model.device.handle
        pairs = {name: tuple(one.to(on) for one in pair) for name, pair in weights.items()}
        return freeze(pairs, config, self.model.rows, self.model.device.dtype)

    def _add_sampler(self, sampler_id: str, freeze: Callable[[], FrozenAdapter | PublishedWeights]) -> None:
        if not sampler_id or sampler_id in self._samplers:
            raise InvalidInput(f"sampler id {sampler_id!r} is taken or empty; samplers are never replaced")
        self._samplers[sampler_id] = self._num_frozen, freeze()
        self._num_frozen += 1

    def drop_sampler(self, command: DropSampler) -> StateResult:
        _, weights = self._find_sampler(command.sampler_id)
        del self._samplers[command.sampler_id]
        if isinstance(self.sampler, FullSampler) and isinstance(weights, PublishedWeights):
            self.sampler.drop(weights)
        return StateResult()

    def add_sample(self, request: SampleRequest) -> None:
        """Validate and enqueue a request; ``sampler.step`` answers it."""
        self._refuse_full_samples()
        if not self.shards.is_alone:
            raise Unsupported(
                f"{self.model.name!r} is trained by {self.shards.size} ranks, which would gather the base for each"
                " token: they score prompts (max_tokens 1, not streamed), and for samples it needs a vLLM sampler"
            )
        self._enqueue_sample(request)

    def is_score(self, request: SampleRequest) -> bool:
        """Return whether ranks of adapters can answer the request: one token needs no pass besides the prompt's."""
        return not self.shards.is_alone and not self._is_full and request.params.max_tokens == 1 and not request.stream

    def score(self, request: SampleRequest) -> SampleResult:
        """Answer a request for prompt scores and one token; all ranks compute the same passes."""
        found: SampleResult | None = None
        try:
            with self.shards.agreed():
                self._enqueue_sample(request)
            while not self.sampler.is_idle:
                with self.shards.agreed():
                    for reply in self.sampler.step():
                        if isinstance(reply, Failed):
                            raise InvalidInput(reply.error) if reply.category == "user" else RuntimeError(reply.error)
                        if isinstance(reply, Done) and isinstance(reply.result, SampleResult):
                            found = reply.result
                self.model.end_pass()
        finally:
            self.sampler.cancel(request.request_id)
        assert found is not None, "a request ends with a reply"
        return found

    def _enqueue_sample(self, request: SampleRequest) -> None:
        images = None
        if request.images:
            images = self.model.vision.read(request.prompt, request.images, "prompt", self.model.max_context, {})
            request = msgspec.structs.replace(request, prompt=images.tokens, images=[])
        check_sample(request, vocab_size=self.model.vocab_size, max_context=self.model.max_context)
        if request.sampler_id is None:
            self.sampler.add(request, None, images)
        else:
            # The sampler caches prompts by this id, so it must never be reused for other weights.
            number, weights = self._find_sampler(request.sampler_id)
            request = msgspec.structs.replace(request, sampler_id=f"{number}")
            if isinstance(self.sampler, FullSampler):
                assert isinstance(weights, PublishedWeights)
                self.sampler.add(request, weights, images)
            else:
                assert isinstance(weights, FrozenAdapter)
                self.sampler.add(request, weights, images)

    def _find_sampler(self, sampler_id: str) -> tuple[int, FrozenAdapter | PublishedWeights]:
        if sampler_id not in self._samplers:
            raise NotFound(f"there is no sampler {sampler_id!r}")
        return self._samplers[sampler_id]

    def status(self) -> Status:
        return Status(
            num_runs=len(self._runs),
            num_samplers=len(self._samplers),
            num_sampling=self.sampler.num_running,
            num_waiting=self.sampler.num_waiting,
            memory_bytes=used_bytes(self.model.device.handle),
            train_tokens=self.trainer.num_tokens,
            sampled_tokens=self.sampler.num_sampled,
            prefilled_tokens=self.sampler.num_prefilled,
            cached_tokens=self.sampler.num_cached,
        )
