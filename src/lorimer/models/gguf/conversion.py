"""Convert a GGUF file into a plain Hugging Face directory, without the hub and without llama.cpp.

Weights are dequantised to bfloat16 (tensors stored as float32 stay float32), what llama.cpp changes in them is undone,
and the configuration says what the file says. A setting or tensor that is not understood is refused by its name,
because a model that silently lacks a term still runs; the reader of transformers ignores those, so it is not used.
`architectures.py` lists the architectures, `reader.py` reads bytes and `tokenizer.py` converts the tokenizer; the
caller caches the result and renames it into place.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lorimer.errors import ModelRefused
from lorimer.models.gguf.architectures import ARCHITECTURES, Architecture, integer, number
from lorimer.models.gguf.reader import GGUFFile, GGUFTensor, read_gguf
from lorimer.models.gguf.tokenizer import special_id, write_tokenizer

Progress = Callable[[str, float | None], None]

_SETTINGS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
}
"""Every `<architecture>.` key that is taken over or changes nothing; a zero in any other means that it is off."""

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
_SHARD_BYTES = 2 << 30


def convert(gguf_path: Path, out: Path, progress: Progress | None = None) -> None:
    """Write the model in `gguf_path` into the directory `out`, which is created.

    `progress` is called with a line of text and the fraction done. Raises `ModelRefused` for a torn file and for
    anything that cannot be taken over exactly; `out` may then hold some of the files.
    """
    file = read_gguf(gguf_path)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelRefused(f"{gguf_path.name!r} has architecture {name!r}; supported are {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[name]
    if file.metadata.get("split.count", 1) > 1:
        raise ModelRefused(
            f"{gguf_path.name!r} is one of {file.metadata['split.count']} parts; join them with gguf-split first"
        )
    out.mkdir(parents=True, exist_ok=True)
    names = {t.name: _hugging_face_name(t.name, kind, name) for t in file.tensors if t.name != _ROPE_FACTORS}
    config = _config(file, kind, f"{name}.")
    _check_tensors(file, names, config)
    _write_json(out / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id")} | {
        "eos_token_id": _stop_ids(file.metadata)
    }
    _write_json(out / "generation_config.json", {key: value for key, value in generation.items() if value is not None})
    write_tokenizer(file.metadata, out)
    _write_weights(file, names, lambda tensor: _weight(file, tensor, kind, config["head_dim"]), out, progress)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _hugging_face_name(name: str, kind: Architecture, architecture: str) -> str:
    match name.split("."):
        case ["blk", layer, block, ("weight" | "bias") as part] if block in kind.blocks and layer.isdecimal():
            return f"model.layers.{int(layer)}.{kind.blocks[block]}.{part}"
        case [outer, "weight"] if outer in _OUTER_NAMES:
            return f"{_OUTER_NAMES[outer]}.weight"
    raise ModelRefused(f"tensor {name!r} is not part of the architecture {architecture!r} as it is supported")


def _config(file: GGUFFile, kind: Architecture, prefix: str) -> dict[str, Any]:
    settings = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key, value in settings.items():
        if key not in _SETTINGS | kind.settings and value:
            raise ModelRefused(f"metadata {prefix}{key} = {value!r} is not understood, so the model could differ")
    hidden_size, num_heads = integer(settings, "embedding_length"), integer(settings, "attention.head_count")
    head_dim = integer(settings, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(settings, key, head_dim) != head_dim:
            raise ModelRefused(f"metadata {prefix}{key} = {settings[key]!r} differs from the head size {head_dim}")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    eos, padding = special_id(file.metadata, "eos"), special_id(file.metadata, "padding")
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_gate.bias" in shapes}
    config = {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": hidden_size,
        "intermediate_size": integer(settings, "feed_forward_length"),
        "num_hidden_layers": integer(settings, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": integer(settings, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": integer(settings, "context_length"),
        "rms_norm_eps": _shortest(number(settings, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, settings, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": special_id(file.metadata, "bos"),
        "eos_token_id": eos,
        "pad_token_id": eos if padding is None else padding,
        "dtype": "float32" if all(_dtype(tensor) == torch.float32 for tensor in file.tensors) else "bfloat16",
        **(biases if kind.model_type == "llama" else {}),
        # Without it AutoTokenizer takes every large vocabulary for a Mistral one of before its repair, and warns.
        "transformers_version": transformers.__version__,
    }
    return config | kind.extra(settings, config)


def _shortest(value: float) -> float:
    """GGUF keeps floats in 32 bits; the decimal that was meant (1e-05) is the shortest that rounds to the same bits."""
    as_stored = torch.tensor(value, dtype=torch.float32)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((number for number in candidates if torch.tensor(number, dtype=torch.float32) == as_stored), value)


def _rope(file: GGUFFile, settings: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    theta = _shortest(number(settings, "rope.freq_base", 10000.0))
    factors = next((tensor for tensor in file.tensors if tensor.name == _ROPE_FACTORS), None)
    kind = settings.get("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise ModelRefused(
                f"rope.scaling.type {kind!r} together with the tensor {_ROPE_FACTORS!r} is not understood"
            )
        return _llama3_rope(_values(file, factors), theta, head_dim)
    match kind:
        case "none":
            return {"rope_type": "default", "rope_theta": theta}
        case "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": number(settings, "rope.scaling.factor")}
        case "yarn":
            return {
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": number(settings, "rope.scaling.factor"),
                "original_max_position_embeddings": integer(settings, "rope.scaling.original_context_length"),
            }
    raise ModelRefused(f"rope.scaling.type {kind!r} is not supported; none, linear and yarn are")


def _llama3_rope(factors_F: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Return transformers' rotary parameters from those llama.cpp stores: each frequency's divisor in Llama 3.1."""
    factor, low, high, length = _shortest(float(factors_F.max())), 1.0, 4.0, 8192
    frequencies_F = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns_F = length * frequencies_F / (2 * math.pi)
    smooth_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    expected_F = 1 / ((1 - smooth_F) / factor + smooth_F)
    if factors_F.shape != expected_F.shape or not torch.allclose(factors_F.double(), expected_F, rtol=1e-4):
        raise ModelRefused(
            f"the divisors in {_ROPE_FACTORS!r} are not those of Llama 3.1's rotary scaling, the only one known"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _stop_ids(metadata: Mapping[str, Any]) -> int | list[int] | None:
    """Return the ids that end a text: end of text, and end of turn or message if the file has them."""
    ids = [special_id(metadata, role) for role in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return unique if len(unique) != 1 else unique[0]


def _check_tensors(file: GGUFFile, names: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Compare names and shapes with the model transformers builds from `config`."""
    if not config["vocab_size"]:
        raise ModelRefused("the file has no tensor 'token_embd.weight'")
    if config["num_hidden_layers"] > len(file.tensors):
        raise ModelRefused(
            f"block_count is {config['num_hidden_layers']}, but the file has only {len(file.tensors)} tensors"
        )
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if num_tokens > config["vocab_size"]:
        raise ModelRefused(f"the tokenizer has {num_tokens} tokens, but the embedding only {config['vocab_size']} rows")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    needed = dict(_shapes(model.state_dict()))
    if config["tie_word_embeddings"]:
        needed.pop("lm_head.weight")
    found = {names[tensor.name]: tensor.shape for tensor in file.tensors if tensor.name in names}
    if missing := sorted(needed.keys() - found.keys()):
        raise ModelRefused(f"the file lacks the tensor for {missing[0]!r} ({len(missing)} missing)")
    for tensor in file.tensors:
        name = names.get(tensor.name)
        if name is not None and needed.get(name) != tensor.shape:
            raise ModelRefused(
                f"tensor {tensor.name!r} has shape {tensor.shape}; the model's {name!r} has {needed.get(name)}"
            )


def _shapes(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the weights, with experts as llama.cpp stores them: gate and up separately."""
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        if name.endswith(".experts.gate_up_proj"):
            for part in ("gate_proj", "up_proj"):
                yield f"{name.removesuffix('gate_up_proj')}{part}.weight", (shape[0], shape[1] // 2, shape[2])
        else:
            yield (f"{name}.weight" if ".experts." in name else name), shape


def _dtype(tensor: GGUFTensor) -> torch.dtype:
    return torch.float32 if tensor.encoding == GGMLQuantizationType.F32 else torch.bfloat16


def _values(file: GGUFFile, tensor: GGUFTensor) -> torch.Tensor:
    raw = file.read(tensor)
    try:
        return torch.from_numpy(dequantize(raw, tensor.encoding).copy()).reshape(tensor.shape)
    except NotImplementedError:
        raise ModelRefused(
            f"tensor {tensor.name!r} is encoded as {tensor.encoding.name}, which cannot be decoded"
        ) from None


def _weight(file: GGUFFile, tensor: GGUFTensor, kind: Architecture, head_dim: int) -> torch.Tensor:
    values = _values(file, tensor)
    if kind.is_permuted and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        values = _unpermuted(values, head_dim)
    if kind.norm_offset and tensor.name.endswith("norm.weight"):
        values = values - kind.norm_offset
    return values.to(_dtype(tensor)).contiguous()


def _unpermuted(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of the two halves that one rotary frequency rotates."""
    return (
        values.reshape(-1, head_dim // 2, 2, values.shape[-1] if values.dim() > 1 else 1)
        .transpose(1, 2)
        .reshape(values.shape)
    )


def _shards(file: GGUFFile, names: Mapping[str, str]) -> Iterator[list[GGUFTensor]]:
    shard: list[GGUFTensor] = []
    shard_bytes = 0
    for tensor in file.tensors:
        if tensor.name not in names:
            continue
        num_bytes = math.prod(tensor.shape) * _dtype(tensor).itemsize
        if shard and shard_bytes + num_bytes > _SHARD_BYTES:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(tensor)
        shard_bytes += num_bytes
    yield shard


def _write_weights(
    file: GGUFFile,
    names: Mapping[str, str],
    weight: Callable[[GGUFTensor], torch.Tensor],
    out: Path,
    progress: Progress | None,
) -> None:
    shards = list(_shards(file, names))
    weight_map: dict[str, str] = {}
    num_bytes = num_done = 0
    for index, shard in enumerate(shards, start=1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        weights: dict[str, torch.Tensor] = {}
        for tensor in shard:
            weights.update(_named(names[tensor.name], weight(tensor)))
            num_done += 1
            if progress is not None:
                progress(f"converting {file.path.name}", num_done / len(names))
        weight_map |= dict.fromkeys(weights, file_name)
        num_bytes += sum(values.nbytes for values in weights.values())
        save_file(weights, out / file_name, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_json(
            out / "model.safetensors.index.json", {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        )


def _named(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split stacked experts into one tensor for each, named as in directories of the hub."""
    before, is_expert, projection = name.partition(".experts.")
    if not is_expert:
        return {name: values}
    return {f"{before}.experts.{number}.{projection}": expert.clone() for number, expert in enumerate(values)}
