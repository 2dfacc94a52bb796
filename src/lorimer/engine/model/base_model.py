"""A frozen base model, opened from a directory and made ready for packed passes with adapters.

transformers provides the architecture and the weights. Here its attention and experts functions are replaced by
ours through its own interfaces, its linear layers by frozen ones that carry adapters, and the result is compared
with the unmodified model on two short sequences: a model whose logits differ is refused, with the reason. Losses are
in ``training/``, token choice is in ``sampling/``.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lorimer.engine.adapters.dora import BaseRows
from lorimer.engine.adapters.lora import LoraTarget, find_targets
from lorimer.engine.config import Quantize
from lorimer.engine.model.attention import group_sequences, packed_attention
from lorimer.engine.model.attention_kernels import Choice, Heads, choose
from lorimer.engine.model.device import Device
from lorimer.engine.model.embedding import replace_embedding
from lorimer.engine.model.experts import packed_experts
from lorimer.engine.model.gradients import SharedGradients, refuse_outside
from lorimer.engine.model.large_pages import use_large_pages
from lorimer.engine.model.linear import (
    FrozenLinear,
    FrozenMatrix,
    Grouping,
    multiplies_as_torch,
)
from lorimer.engine.model.logit_map import LogitMap, find_logit_map
from lorimer.engine.model.masters import MASTER_DTYPE, MasterWeights
from lorimer.engine.model.mlp import replace_gated_mlps
from lorimer.engine.model.norms import FrozenRMSNorm, replace_norms
from lorimer.engine.model.quantization import QuantizedWeight
from lorimer.engine.model.quantized_loading import Quantization, load_quantized, materialized
from lorimer.engine.model.stepping import LayerStep
from lorimer.engine.model.vision import TEXT_ONLY, Placement, SequenceImages, Vision, model_class, open_vision
from lorimer.engine.native import library, matmul, rowwise
from lorimer.engine.native.decode import Decoding
from lorimer.engine.sampling.kv_cache import DecodeAttention, PrefillAttention, PrefillSpan, PromptCache, Slab
from lorimer.engine.sharding import ALONE, Shards
from lorimer.engine.training.batch import Pass, PassSlot
from lorimer.errors import InvalidInput, ModelRefused

IMPLEMENTATION = "lorimer"
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_TOLERANCE = {torch.float32: (2e-3, 2e-3), torch.bfloat16: (0.75, 0.12)}
"""Maximum and mean difference of log probabilities from the model's own forward, which rounds as well: in bfloat16 that
of ``lorimer/tiny`` differs from its float32 by up to 0.28, by 0.05 in the mean, and ours by 0.16 and 0.03."""


class BaseModel:
    """The frozen base model that all runs share; each pass brings its adapters."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: Device,
        name: str = "",
        directory: str = "",
        vision: Vision | str = TEXT_ONLY,
        trains_base: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """``vision`` reads images; a string is the reason why this model cannot.

        With ``trains_base`` the weights are those of a full run, float32.
        """
        self.quantize: Quantize = "none" if quantization is None else quantization.kind
        self.name, self.directory, self.device = name, directory, device
        self._vision = vision
        self.shards = ALONE
        self._gradients: SharedGradients | None = None
        """Of the weights of a full run that ranks share."""
        self.config = model.config.get_text_config()
        self.max_context = longest_context(self.config)
        self.vocab_size: int = self.config.vocab_size
        quantized = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
        self.num_parameters = sum(p.numel() for p in model.parameters()) + sum(one.num_weights for one in quantized)
        self.architecture = type(model).__name__
        refuse_unpackable(self.config)
        model.requires_grad_(False).eval().to(device.handle)
        self.masters = MasterWeights(model, device.dtype if trains_base else None)
        self.targets: list[LoraTarget] = find_targets(model) if quantization is None else quantization.targets
        self.slot = PassSlot(trains_base)
        self.transformer = model
        self.grouping = Grouping(device.handle, device.dtype, self.config.hidden_size)
        probe = [torch.arange(n) * 7 % self.vocab_size for n in (11, 6)]
        with torch.no_grad():
            with materialized(model):
                reference = _reference_logits(model, probe, device.handle)
                seen = None if isinstance(vision, str) else vision.probe()
            self._inject(model)
            self.logit_map = LogitMap()
            try:
                self._check(probe, reference)
                if seen is not None:
                    self._check_images(*seen)
            except (AttributeError, RuntimeError, TypeError) as error:
                # Models with an attention of their own fail here, because they do not get the mask they expect.
                raise ModelRefused(f"{self.architecture} cannot be packed: {error}") from error
            self._probe_steps(probe[0].to(device.handle))
        self._choose_kernels()

    def _inject(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        self.head = FrozenMatrix.of(head)
        self._embedding, self._output = model.get_input_embeddings(), head
        self.head_target = self.targets[-1]
        by_module: dict[str, list[LoraTarget]] = {}
        for target in self.targets[:-1]:
            by_module.setdefault(target.module, []).append(target)
        # In a vision-language model, only the language model is modified.
        part = model if isinstance(self._vision, str) else model.get_decoder()
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and module is not head and name in by_module:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, FrozenLinear(module, by_module[name], self.slot))
            elif name in by_module:
                module.lorimer_targets = {t.name.rpartition(":")[2]: t for t in by_module[name]}
                module.lorimer_anchor = torch.empty(0, device=self.device.handle, requires_grad=True)
            # transformers passes the module to attention and experts functions; they find the current pass through it.
            module.lorimer_slot = self.slot
        _number_attention_layers(part)
        replace_norms(part, self.slot.trains_base)
        replace_gated_mlps(part, self.slot)
        self.steps = []
        self._layers = _decoder_layers(model)
        for layer in self._layers:
            step = LayerStep(layer, _checkpointable(layer.forward, self.slot), self.slot)
            layer.forward = step
            self.steps.append(step)
        if part is not model:
            _use_implementation(model, "sdpa")  # a vision tower's eager attention needs memory quadratic in its patches
        _use_implementation(part, IMPLEMENTATION)
        self.decoder = model.get_decoder()
        if self.slot.trains_base:
            self._find_native(replace_embedding(self._embedding))
        self.rows = self._find_rows()

    def _find_rows(self) -> dict[str, BaseRows]:
        """Return the rows of every target but experts, for DoRA; their norms are computed when they are needed."""
        owners: dict[str, FrozenMatrix] = {self.head_target.name: self.head}
        for layer in self.decoder.modules():
            if isinstance(layer, FrozenLinear):
                owners |= {target.name: layer.matrix for target in layer.targets}
        return {t.name: BaseRows.of(owners[t.name], t) for t in self.targets if t.name in owners}

    # ── weights that a full run trains ────────────────────────────────────────────────────────────────

    def _find_native(self, is_embedding_ours: bool) -> None:
        """Let autograd compute the gradients that no layer of ours does, of routers, other norms and the like."""
        ours = {id(p) for p in self._output.parameters()}
        for module in self.transformer.modules():
            if isinstance(module, FrozenLinear | FrozenRMSNorm) or hasattr(module, "lorimer_targets"):
                ours |= {id(p) for p in module.parameters(recurse=False)}
            if isinstance(sinks := getattr(module, "sinks", None), Tensor):
                ours.add(id(sinks))
        if is_embedding_ours:
            ours.add(id(self._embedding.weight))
        elif self._embedding.weight is self._output.weight:
            ours.discard(id(self._embedding.weight))
        self._native = {name for name, p in self.transformer.named_parameters() if id(p) not in ours}

    @contextlib.contextmanager
    def recording(self, buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Add gradients of parameters to ``buffers``, by their names, within the block.

        A rank's buffers are for its parts of the parameters; a pass that is computed backward adds to them.
        """
        trained = {name: self.transformer.get_parameter(name) for name in buffers}
        for name, parameter in trained.items():
            parameter.grad = buffers[name] if self.shards.is_alone else None
            parameter.requires_grad_(name in self._native)
        if self._gradients is not None:
            self._gradients.record(buffers)
        try:
            yield
        finally:
            for parameter in trained.values():
                parameter.grad = None
                parameter.requires_grad_(False)
            if self._gradients is not None:
                self._gradients.record({})

    def summing_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Compute a pass backward within the block, after the head; ranks sum what their layers add to gradients."""
        return contextlib.nullcontext() if self._gradients is None else self._gradients.summing()

    @contextlib.contextmanager
    def with_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with other weights within the block; nothing is copied."""
        parameters = {name: self.transformer.get_parameter(name) for name in weights}
        own = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = weights[name]
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]

    def _choose_kernels(self) -> None:
        """Choose the implementation of each layer's attention on the device that the model has now."""
        known: dict[Any, Choice] = {}
        for module in self.decoder.modules():
            if hasattr(module, "lorimer_heads"):
                shape, heads = module.lorimer_shape, module.lorimer_heads
                key = shape.scale, shape.window, shape.softcap, shape.sinks is None, heads
                if key not in known:
                    # A full run may train the sinks.
                    has_sinks = self.slot.trains_base and shape.sinks is not None
                    refused = Choice(None, {"kernels": "have no gradient of sinks"})
                    known[key] = refused if has_sinks else choose(shape, heads, self.device.dtype, self.device.handle)
                module.lorimer_kernel = known[key].kernel
        self.kernels = [f"attention{_describe_layers(*key)}: {choice}" for key, choice in known.items()]
        compiled = [part.describe(self.device.type, self.device.dtype) for part in (matmul, rowwise)]
        self.kernels += [f"products of several adapters: {self.grouping}", *compiled, self.describe_decoding()]
        """What was chosen when the model came to its device, and why nothing else, in one line each."""

    # ── sharding ──────────────────────────────────────────────────────────────────────────────────────

    def shard(self, shards: Shards, device: Device) -> None:
        """Divide the weights between ranks, on ``device``; norms and what is not a parameter stay whole.

        Afterwards compare a pass with one before: every rank computes it, of weights that come from all of them.
        """
        probe = torch.arange(11) * 7 % self.vocab_size
        with torch.no_grad():
            before = self._probe_logits(probe)
            for module in self.decoder.modules():
                _move_plain_tensors(module, device.handle)
            if not self.slot.trains_base:
                for rows in self.rows.values():
                    rows.keep_squares(device.handle)  # of whole weights, which later there are only within a pass
            head = self._output
            if head.weight is self._embedding.weight:
                # One parameter of two modules: the embedding keeps it; the head's own forward is never called.
                head._parameters["weight"] = None
                self.head = self.rows[self.head_target.name].weight = FrozenMatrix.of(self._embedding).with_bias_of(
                    head
                )
                head = None
            others = [self._embedding] if head is None else [self._embedding, head]
            if self.slot.trains_base:
                refuse_outside(self.transformer, [self.decoder, *others])
                self.masters.drop_copies()
            shards.shard(self.decoder, self._layers, others, device.dtype if self.slot.trains_base else None)
            self.shards, self.device = shards, device
            if self.slot.trains_base:
                self._gradients = SharedGradients(self.transformer, self.decoder, self._layers, others, shards)
            self.grouping = Grouping(device.handle, device.dtype, self.config.hidden_size)
            self._choose_kernels()
            self._head_unit = others[-1]
            after = self._probe_logits(probe)
            self.end_pass()
        difference = (after.log_softmax(-1) - before.log_softmax(-1)).abs()
        if not self._is_close(difference):
            raise ModelRefused(
                f"{self.architecture} cannot be sharded: a pass differs by {difference.max().item():.3g} in log"
                " probability from one with whole weights"
            )

    def sharded_bytes(self, size: int) -> int:
        """Return the memory that each of ``size`` ranks will need for the base: its part, and what it gathers."""
        layers = [sum(p.nbytes for p in layer.parameters()) for layer in self._layers]
        ends = max(self._embedding.weight.nbytes, self._output.weight.nbytes)
        total = sum(p.nbytes for p in {*self.decoder.parameters(), *self._output.parameters()})
        gathered, gradients = max(2 * max(layers), ends), 0
        if self.slot.trains_base:
            # What is kept, and gradients, are float32 whatever is gathered.
            ratio = MASTER_DTYPE.itemsize // self.device.dtype.itemsize
            # A layer is gathered while the one before it is computed. Its gradient is whole meanwhile, and exists twice
            # while it is summed.
            total, gradients = ratio * total, ratio * (2 * max(*layers, ends) + ends)
        return total // size + gathered + gradients

    @property
    def local_bytes(self) -> int:
        """Size of the parameters that this process keeps between passes."""
        if self.slot.trains_base:
            return sum(tensor.nbytes for tensor in self.masters.tensors().values())
        return self.shards.local_bytes([self.decoder, self._output])

    def _probe_logits(self, probe: Tensor) -> Tensor:
        tokens = probe.to(self.device.handle)
        groups = group_sequences([len(tokens)], [0], self.device.handle)
        hidden = self.hidden(tokens, torch.arange(len(tokens), device=tokens.device), Pass([], groups=groups))
        with self.gathered_head():
            return self.logit_map.apply_(self.head.multiply(hidden).float()).cpu()

    @contextlib.contextmanager
    def gathered_head(self, is_trained: bool = False) -> Iterator[None]:
        """Gather the weight of the head, which ranks share, for as long as it is used; all ranks do so together.

        With ``is_trained`` its gradient may be added to, until ``summing_gradients`` sums it.
        """
        unit = None if self.shards.is_alone else self._head_unit
        if isinstance(unit, FSDPModule):
            with self.shards.together():
                unit.unshard()
                if is_trained and self._gradients is not None:
                    self._gradients.begin_head()
        try:
            yield
        finally:
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def end_pass(self) -> None:
        """Forget a pass whose backward pass is not computed."""
        if isinstance(self.decoder, FSDPModule):
            self.decoder.reset_iter_state()

    @property
    def position_bytes(self) -> int:
        """Size of the keys and values of one position in all layers."""
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return int(2 * config.num_hidden_layers * num_kv * head_dim * self.device.dtype.itemsize)

    @property
    def no_images(self) -> str:
        """Why the model reads no images; empty if it does."""
        return self._vision if isinstance(self._vision, str) else ""

    @property
    def vision(self) -> Vision:
        if isinstance(self._vision, str):
            raise InvalidInput(f"{self.name!r} reads no images: {self._vision}")
        return self._vision

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, current: Pass, placements: Sequence[Placement] = ()
    ) -> Tensor:
        """Return the final hidden states ``(T, H)``, ready for the head; positions are counted within each sequence."""
        if placements:
            inputs = self.vision.overlay(tokens_T, positions_T, placements)
        else:
            inputs = {"input_ids": tokens_T.unsqueeze(0), "position_ids": positions_T.unsqueeze(0)}
        current.slices = self.grouping.arrange(current.slices)
        self.slot.current = current
        try:
            with self.shards.together():
                output = self.decoder(**inputs, use_cache=False)
        finally:
            self.slot.current = Pass([])
        return output.last_hidden_state[0]

    def _check(self, probe: list[Tensor], reference: Tensor) -> None:
        """Compare a packed and a cached pass with the model's own, and find its logit map."""
        lengths, on = [len(p) for p in probe], self.device.handle
        groups = group_sequences(lengths, [0, lengths[0]], on, max_waste=0)
        positions = torch.cat([torch.arange(n) for n in lengths])
        hidden = self.hidden(torch.cat(probe).to(on), positions.to(on), Pass([], groups=groups))
        cached = self.head.multiply(self._hidden_by_cache(probe[0].to(on))).float()
        raw = self.head.multiply(hidden).float()
        self.logit_map = find_logit_map(raw, reference, self.config)
        pairs = ((raw, reference), (cached, reference[lengths[0] - 1 : lengths[0]]))
        differences = [
            (self.logit_map.apply_(ours).log_softmax(-1) - theirs.log_softmax(-1)).abs() for ours, theirs in pairs
        ]
        difference = max(one.max().item() for one in differences)
        if not self._is_close(*differences):
            raise ModelRefused(
                f"{self.architecture} cannot be packed: sequences computed together differ from each computed"
                f" alone by {difference:.3g} in log probability. It uses something besides causal attention over"
                " positions (a recurrent state, a mask or an attention function of its own)."
            )

    def _is_close(self, *differences: Tensor) -> bool:
        maximum, mean = _TOLERANCE[self.device.dtype]
        return all(one.max().item() <= maximum and one.mean().item() <= mean for one in differences)

    def _check_images(self, images: SequenceImages, reference: Tensor) -> None:
        """Compare a sequence that has an image with the result of the model's own forward."""
        tokens = torch.from_numpy(images.tokens).to(self.device.handle)
        groups = group_sequences([len(tokens)], [0])
        positions = torch.arange(len(tokens), device=tokens.device)
        hidden = self.hidden(tokens, positions, Pass([], groups=groups), [Placement(images, 0, 0, len(tokens))])
        logits = self.logit_map.apply_(self.head.multiply(hidden).float())
        differences = (logits.log_softmax(-1) - reference.log_softmax(-1)).abs()
        if not self._is_close(differences):
            raise ModelRefused(
                f"{self.architecture} cannot be served: a sequence with an image differs from the model's own forward"
                f" by {differences.max().item():.3g} in log probability"
            )

    def _hidden_by_cache(self, tokens: Tensor) -> Tensor:
        """Return the hidden state of the last token, computed with the others in a key/value cache."""
        positions = torch.tensor([len(tokens) - 1], device=tokens.device)
        return self._decode(tokens[:-1], tokens[-1:], positions)

    def _probe_steps(self, tokens: Tensor) -> None:
        """Find the layers that ``LayerStep`` can compute, by rows at the next position and at distant ones."""
        found = library.load(self.device.dtype) if self.device.type == "cpu" else "they are for CPUs"
        self.native: Decoding | None = None if isinstance(found, str) else Decoding(found)
        """Compiled functions for decoding."""
        for step in self.steps:
            step.probe(self.native)
        positions = [len(tokens) - 3, self.max_context // 2, self.max_context - 1]
        self._decode(tokens[:-3], tokens[-3:], torch.tensor(positions, device=tokens.device))
        self._no_native = found if isinstance(found, str) else "compiled functions give other results"
        is_wrong = any(step.is_used and not step.is_native for step in self.steps)
        if self.native is not None and (is_wrong or not multiplies_as_torch(self.native, self.device.dtype)):
            self.native = None

    def describe_decoding(self) -> str:
        """Return what decodes, compiled functions or torch, and why."""
        if self.native is None:
            return f"decoding: torch ({self._no_native})"
        num = sum(step.has_native_attention for step in self.steps)
        return f"decoding: compiled by {self.native.compiler}, with the attention of {num} of {len(self.steps)} layers"

    def _decode(self, prompt: Tensor, tokens_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return the hidden states of tokens that each follow the cached prompt."""
        cache, slab = PromptCache(len(prompt)), Slab(1 << 20)
        prefill = PrefillAttention([PrefillSpan(0, len(prompt), cache)])
        self.hidden(prompt, torch.arange(len(prompt), device=prompt.device), Pass([], cache=prefill))
        prefill.finish()
        if not cache.layers:
            raise ModelRefused(f"{self.architecture} does not use transformers' attention interface")
        for _ in tokens_N:
            slab.add(cache)
        decode = DecodeAttention(slab, range(len(tokens_N)), prompt.device)
        return self.hidden(tokens_N, positions_N, Pass([], cache=decode))


def register_implementations() -> None:
    """Register our attention and experts functions with transformers; only models opened here use them.

    No function for masks, so that transformers makes none: packed attention knows the sequences itself.
    """
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, packed_experts)


def load_model(
    directory: Path,
    device: Device,
    name: str,
    max_image_pixels: int = 2**24,
    is_sharded: bool = False,
    trains_base: bool = False,
    quantize: Quantize = "none",
) -> BaseModel:
    """Load a Hugging Face directory without downloading anything or running code in it."""
    assert quantize == "none" or not (is_sharded or trains_base), "refused by EngineConfig"
    register_implementations()
    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    kind, quantization = model_class(config, name), None
    if quantize == "none":
        model = kind.from_pretrained(
            directory,
            dtype=MASTER_DTYPE if trains_base else device.dtype,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",
        )
    else:
        model, quantization = load_quantized(quantize, kind, config, directory, device.dtype, name)
    if device.type == "cpu" and not (is_sharded or trains_base):  # those get other weights yet
        use_large_pages(model)
    vision = open_vision(model, directory, device, max_image_pixels)
    if is_sharded and not isinstance(vision, str):
        # The tower would have to be whole on every rank, and its passes the same on all of them.
        vision = "its base is shared by several ranks, which read text only"
    if trains_base and getattr(config, "vision_config", None) is not None:
        raise ModelRefused(
            f"{name!r} has a vision tower; full fine-tuning accepts models of text only, LoRA this one too"
        )
    return BaseModel(model, device, name, str(directory), vision, trains_base, quantization)


def load_tokenizer(directory: Path | str) -> Any:
    """Load the model's tokenizer; return ``None`` if the directory has none."""
    directory = Path(directory)
    if not (directory / "tokenizer_config.json").exists() and not (directory / "tokenizer.json").exists():
        return None
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def eos_token_ids(directory: Path, config: Any, tokenizer: Any) -> list[int]:
    """Collect the end-of-sequence tokens of the generation config, the model config and the tokenizer."""
    ids: set[int] = set()
    generation = directory / "generation_config.json"
    found = [json.loads(generation.read_text()).get("eos_token_id")] if generation.exists() else []
    found += [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def _move_plain_tensors(module: nn.Module, device: torch.device) -> None:
    """Move the tensors of a module that are neither parameters nor buffers: weights of norms, and anchors."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor):
            # A copy: loaded tensors can be parts of one file in memory, which would stay as long as one of them.
            setattr(module, name, value.detach().to(device, copy=True).requires_grad_(value.requires_grad))


def _use_implementation(model: nn.Module, name: str) -> None:
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        config._attn_implementation_internal = name
        config._experts_implementation_internal = name


def _reference_logits(model: PreTrainedModel, probe: list[Tensor], device: torch.device) -> Tensor:
    """Compute the logits of each sequence alone, with the model's own eager attention."""
    _use_implementation(model, "eager")
    outputs = [model(input_ids=p[None].to(device), use_cache=False).logits[0].float() for p in probe]
    return torch.cat(outputs)


def longest_context(config: Any) -> int:
    """Return the longest sequence whose positions do not depend on the rest of the batch.

    Long and dynamic rotary scalings switch tables with the longest position of a pass, so those models are served
    up to the length they were first trained at.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds: list[dict[str, Any]] = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type") in ("longrope", "dynamic"):
            of_config: int | None = getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, kind.get("original_max_position_embeddings") or of_config or limit)
    return limit


def refuse_unpackable(config: Any) -> None:
    strange = set(getattr(config, "layer_types", None) or []) - _PACKABLE_LAYERS
    if strange:
        raise ModelRefused(
            f"{config.model_type!r} has layers of type {', '.join(sorted(map(repr, strange)))};"
            " only full and sliding-window attention can be packed"
        )


def _number_attention_layers(model: nn.Module) -> None:
    """Number the attention modules by their layer of the key/value cache."""
    number = 0
    for module in model.modules():
        if "Attention" in type(module).__name__ and hasattr(module, "layer_idx"):
            module.lorimer_layer = number  # type: ignore[assignment]
            number += 1


def _describe_layers(scale: float, window: int | None, softcap: float | None, no_sinks: bool, heads: Heads) -> str:
    parts = ["" if window is None else f"a window of {window}", "" if softcap is None else "a soft cap"]
    others = ", ".join(filter(None, [*parts, "" if no_sinks else "sinks"]))
    return f" with {heads[0]} heads of {heads[2]}" + (f", {others}" if others else "")


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers: the members of its longest module list."""
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    return max((list(layers) for layers in lists), key=len, default=[])


def _checkpointable(forward: Callable[..., Any], slot: PassSlot) -> Callable[..., Any]:
    """Wrap the layer's forward so that a checkpointed pass recomputes it in the backward pass."""

    def run(*args: Any, **kwargs: Any) -> Any:
        current = slot.current
        if not (current.is_checkpointed and torch.is_grad_enabled()):
            return forward(*args, **kwargs)

        def within_pass(*args: Any, **kwargs: Any) -> Any:
            before, slot.current = slot.current, current
            try:
                return forward(*args, **kwargs)
            finally:
                slot.current = before

        return torch.utils.checkpoint.checkpoint(within_pass, *args, use_reentrant=False, **kwargs)

    return run
