"""Merge an adapter into the weights of its base model: read a Hugging Face directory and write one, shard by shard.

At most one shard and the change of one weight are in memory. A weight keeps the name it is stored under: where
transformers fuses stored weights as it loads them (experts), the change is cut up by its own rules, which are linear.
An adapter of the head unties a head that is tied to the embedding. Every trained weight is changed exactly once, or
the merge is refused. `models/export/check.py` checks the result.
"""

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from lorimer.engine.adapters.adapters import Pairs
from lorimer.engine.adapters.checkpoints import load_weights, read_config
from lorimer.engine.adapters.dora import BaseRows, RowScales
from lorimer.engine.adapters.lora import LoraTarget, find_targets, is_trained, scale_of
from lorimer.engine.model.vision import model_class
from lorimer.errors import CheckpointError, ModelRefused
from lorimer.models.sources import COMPANION_FILES

Progress = Callable[[str, float | None], None]
MergedDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtype of the merged weights; ``auto`` keeps that of each stored weight."""

_SHARD_BYTES = 2 << 30
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """One tensor of the base model's files."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    def num_bytes(self, dtype: MergedDtype) -> int:
        kept = _DTYPES.get(self.dtype, torch.float32)
        return math.prod(self.shape) * (kept if dtype == "auto" else getattr(torch, dtype)).itemsize


@dataclass(frozen=True)
class Written:
    """One tensor of the merged model: where it is read from, and the weight whose change it takes a piece of."""

    name: str
    source: str
    weight: str | None = None
    is_whole: bool = True
    """Whether it is loaded as it is stored, or cut out of the weight by rules of transformers."""


class LoadedAdapter:
    """The pairs of a saved adapter, for the model in a directory, whose weights are not loaded."""

    def __init__(self, adapter: Path, base: Path) -> None:
        self.model = empty_model(base)
        targets = find_targets(self.model)
        self.config = read_config(str(adapter))
        self.pairs: Pairs = load_weights(str(adapter), targets, self.config)
        self.scale = scale_of(self.config)
        self.by_weight: dict[str, list[LoraTarget]] = defaultdict(list)
        for target in targets:
            if is_trained(target, self.config):
                self.by_weight[_weight_name(self.model, target)].append(target)
        embedding = self.model.get_input_embeddings()
        self.head = f"{targets[-1].module}.weight"
        self.embedding = next(f"{n}.weight" for n, module in self.model.named_modules() if module is embedding)
        self.unties = is_tied(self.model) and self.head in self.by_weight

    @property
    def use_dora(self) -> bool:
        return self.config.use_dora is True

    def apply(self, weight: str, base: Tensor) -> Tensor:
        """Return a weight of the base with the adapter, float32, in the layout of the loaded model."""
        merged = self.change(weight).add_(base)
        if self.use_dora:
            targets = {target.name: target for target in self.by_weight[weight]}
            rows = {name: BaseRows.of(_Whole(base), target) for name, target in targets.items()}
            scales = RowScales(rows, self.pairs, self.scale)
            for name, target in targets.items():
                merged[target.rows] *= scales.of(name).factors_O[:, None]
        return merged

    def change(self, weight: str) -> Tensor:
        """Return what the pairs add to a weight, float32, in the layout of the loaded model."""
        change = torch.zeros(self.model.get_parameter(weight).shape, dtype=torch.float32)
        for target in self.by_weight[weight]:
            a, b, *_ = self.pairs[target.name]
            is_transposed = bool(target.num_experts) and self.model.get_submodule(target.module).is_transposed
            rows = change.transpose(-1, -2) if is_transposed else change
            rows[..., target.rows, :] = self.scale * (b @ a)  # a factor that experts share is used for each
        return change


@dataclass(frozen=True)
class _Whole:
    """A weight that is in memory."""

    tensor: Tensor

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        return self.tensor[rows]


def empty_model(directory: Path) -> PreTrainedModel:
    """Build the architecture of a model without its weights."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except ValueError as error:
        raise ModelRefused(f"{str(directory)!r} has no architecture that transformers knows: {error}") from error
    opens = model_class(config, str(directory))
    with torch.device("meta"):
        model: PreTrainedModel = opens.from_config(config)
    return model


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the output head is the embedding."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    return head.weight is embedding.weight


def _weight_name(model: PreTrainedModel, target: LoraTarget) -> str:
    if not target.num_experts:
        return f"{target.module}.weight"
    if target.name.endswith(":down"):
        return f"{target.module}.down_proj"
    return f"{target.module}.{'gate_up_proj' if model.get_submodule(target.module).has_gate else 'up_proj'}"


def merge(adapter: LoadedAdapter, base: Path, out: Path, dtype: MergedDtype, progress: Progress) -> set[torch.dtype]:
    """Write the merged model into the empty directory ``out``; return the dtypes of the weights that changed."""
    settings = _read_json(base / "config.json")
    if quantized := settings.get("quantization_config"):
        raise ModelRefused(
            f"the weights in {str(base)!r} are stored quantised ({quantized.get('quant_method')!r}); an adapter can be"
            " merged only into plain ones: save them with from_pretrained(...).dequantize().save_pretrained(...) first"
        )
    stored = stored_tensors(base)
    written = _plan(adapter, stored)
    changed = _write_shards(adapter, stored, written, out, dtype, progress)
    _write_json(out / "config.json", _merged_config(settings, adapter.unties, dtype))
    for pattern in COMPANION_FILES:
        for path in base.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out / path.name)
    return changed


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """List every tensor of the model's files, in the order of files and names, reading only headers."""
    index = directory / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    found: dict[str, Stored] = {}
    for name in names:
        with safe_open(directory / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(key)
                found[key] = Stored(directory / name, tuple(part.get_shape()), part.get_dtype())
    return found


def _plan(adapter: LoadedAdapter, stored: Mapping[str, Stored]) -> list[Written]:
    """Return the tensors to write, in order; the pieces of one weight are consecutive."""
    loaded = _loaded_names(adapter.model, stored)
    pieces = {weight: _stored_pieces(adapter, weight, stored, loaded) for weight in adapter.by_weight}
    weight_of = {name: weight for weight, names in pieces.items() for name in names}
    if len(weight_of) < sum(map(len, pieces.values())):
        raise ModelRefused("two trained weights are stored as one tensor, which cannot be merged")
    plan: dict[str, Written] = {}
    for name in stored:
        weight = weight_of.get(name)
        for piece in pieces[weight] if weight else [name]:
            plan.setdefault(piece, Written(piece, piece, weight, is_whole=not weight or loaded.get(weight) == piece))
    if adapter.head in pieces and not pieces[adapter.head]:
        plan[adapter.head] = Written(adapter.head, loaded[adapter.embedding], adapter.head)
    return list(plan.values())


def _loaded_names(model: PreTrainedModel, stored: Mapping[str, Stored]) -> dict[str, str]:
    """Map loaded names to stored names, for weights that transformers only renames."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for name in stored:
        loaded, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if loaded not in state and name in state:
            loaded, pattern = name, None
        if pattern is None:
            found[loaded] = name
    return found


def _stored_pieces(
    adapter: LoadedAdapter, weight: str, stored: Mapping[str, Stored], loaded: Mapping[str, str]
) -> list[str]:
    shape = tuple(adapter.model.get_parameter(weight).shape)
    name = loaded.get(weight)
    if name is None and adapter.unties and weight == adapter.head:
        return []  # stored as the embedding, which stays as it is
    if name is not None and stored[name].shape == shape:
        return [name]
    pieces = revert_weight_conversion(adapter.model, {weight: torch.empty(shape, device="meta")})
    if all(name in stored and stored[name].shape == tuple(piece.shape) for name, piece in pieces.items()):
        if adapter.use_dora:
            raise ModelRefused(
                f"the weight {weight!r} is stored in pieces ({', '.join(map(repr, list(pieces)[:2]))}); a DoRA adapter"
                " is merged only into weights that are stored whole"
            )
        return list(pieces)
    raise ModelRefused(
        f"the weight {weight!r} of shape {shape} is stored under other names or in another form"
        f" ({', '.join(map(repr, list(pieces)[:2]))} were looked for), so the adapter cannot be merged into it"
    )


def _write_shards(
    adapter: LoadedAdapter,
    stored: Mapping[str, Stored],
    written: list[Written],
    out: Path,
    dtype: MergedDtype,
    progress: Progress,
) -> set[torch.dtype]:
    shards = list(_shards(stored, written, dtype))
    weight_map: dict[str, str] = {}
    changed: set[torch.dtype] = set()
    num_bytes = 0
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in {s.file for s in stored.values()}}
        changes = _Changes(adapter)
        for index, shard in enumerate(shards, start=1):
            file_name = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for item in shard:
                tensor = _merged(files[stored[item.source].file].get_tensor(item.source), item, changes, dtype)
                tensors[item.name] = tensor
                weight_map[item.name] = file_name
                num_bytes += tensor.nbytes
                if item.weight:
                    changed.add(tensor.dtype)
                progress("merging", len(weight_map) / len(written))
            save_file(tensors, out / file_name, metadata={"format": "pt"})
    changes.check_all_taken()
    if len(shards) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        _write_json(out / "model.safetensors.index.json", content)
    return changed


def _shards(stored: Mapping[str, Stored], written: list[Written], dtype: MergedDtype) -> Iterator[list[Written]]:
    shard: list[Written] = []
    shard_bytes = 0
    for item in written:
        num_bytes = stored[item.source].num_bytes(dtype)
        if shard and shard_bytes + num_bytes > _SHARD_BYTES:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(item)
        shard_bytes += num_bytes
    yield shard


class _Changes:
    """Computes the changes of one weight at a time, and returns each piece once."""

    def __init__(self, adapter: LoadedAdapter) -> None:
        self._adapter = adapter
        self._left = set(adapter.by_weight)
        self._pieces: dict[str, Tensor] = {}

    def merge(self, item: Written, base: Tensor) -> Tensor:
        """Return a stored tensor with its piece of the change."""
        assert item.weight is not None
        if item.is_whole:
            self._left.remove(item.weight)
            return self._adapter.apply(item.weight, base)
        return self._take(item).add_(base)

    def _take(self, item: Written) -> Tensor:
        assert item.weight is not None
        if item.weight in self._left:
            assert not self._pieces, "the pieces of a weight are written together"
            self._left.remove(item.weight)
            change = self._adapter.change(item.weight)
            self._pieces = revert_weight_conversion(self._adapter.model, {item.weight: change})
        return self._pieces.pop(item.name)

    def check_all_taken(self) -> None:
        if missed := sorted(self._left | self._pieces.keys()):
            raise ModelRefused(f"the change of {missed[0]!r} found no stored weight ({len(missed)} in all)")


def _merged(tensor: Tensor, item: Written, changes: _Changes, dtype: MergedDtype) -> Tensor:
    out = tensor.dtype if dtype == "auto" or not tensor.is_floating_point() else getattr(torch, dtype)
    if item.weight is None:
        merged = tensor.to(out)
    else:
        if tensor.dtype not in _DTYPES.values():
            raise ModelRefused(f"{item.source!r} is stored as {tensor.dtype}, into which no adapter can be merged")
        merged = changes.merge(item, tensor).to(out)
    if out == torch.float16 and not torch.isfinite(merged).all():
        raise CheckpointError(f"{item.name!r} has numbers beyond the range of float16; bfloat16 and float32 are wider")
    return merged.contiguous()


def _merged_config(settings: dict[str, Any], unties: bool, dtype: MergedDtype) -> dict[str, Any]:
    merged = dict(settings)
    if isinstance(merged.get("text_config"), dict):
        merged["text_config"] = _merged_config(merged["text_config"], unties, dtype)
    if unties:
        merged["tie_word_embeddings"] = False
    if dtype != "auto":
        merged.pop("torch_dtype", None)  # what dtype was called before
        merged["dtype"] = dtype
    return merged


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{str(path)!r} cannot be read as JSON: {error}") from None
    return content


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
