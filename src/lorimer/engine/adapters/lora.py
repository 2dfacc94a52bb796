"""Which weights of a base model get a low-rank pair, what shape the pair has, and how it begins.

The targets are those Tinker trains: attention and MLP projections of every decoder layer and the output head; no
embedding, no router, no norm. Parts of a fused projection are targets of their own, and the experts of a layer
share the factor that touches the hidden size. Applying, training and storing pairs is done elsewhere.

Shape letters: R rank, I input features, O output features, E experts.
"""

import hashlib
import math
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lorimer.engine.messages import LoraConfig
from lorimer.errors import InvalidInput, ModelRefused, Unsupported

ALPHA = 32
MAX_RANK = 512

Group = Literal["attn", "mlp", "unembed"]
Shape = tuple[int, ...]

_ATTENTION = re.compile(r"attn|attention")
_MLP = re.compile(r"mlp|ffn|feed_?forward|expert|moe|^ff$|^fc\d$")
_EXPERT_COUNT = re.compile(r"^(num|n|moe_num)_.*experts$")


@dataclass(frozen=True)
class LoraTarget:
    """One low-rank pair: ``y[:, rows] += scale * B @ (A @ x)``."""

    name: str
    """Unique; the module's path, with ``:q`` and the like for a part of a fused weight or of experts."""
    module: str
    """Path of the module that owns the frozen weight."""
    group: Group
    in_features: int
    out_features: int
    """Rows of this part."""
    row_offset: int = 0
    """First row of this part in the output of its weight."""
    num_experts: int = 0
    """0 for a dense weight."""
    shared: Literal["", "A", "B"] = ""
    """The factor all experts of the layer have in common: the one that touches the hidden size."""
    row_step: int = 1
    """Distance between rows of this part; 2 where gate and up alternate row by row."""

    @property
    def rows(self) -> slice:
        """The rows of this part in the output of its weight."""
        return slice(self.row_offset, self.row_offset + self.out_features * self.row_step, self.row_step)


def scale_of(config: LoraConfig) -> float:
    """Return the factor of an adapter's products."""
    return ALPHA / (math.sqrt(config.rank) if config.use_rslora is True else config.rank)


def shapes(target: LoraTarget, rank: int) -> tuple[Shape, Shape]:
    """Return the shapes of A and B: ``(R, I)`` and ``(O, R)``, with E in front of a factor of each expert's own."""
    experts: Shape = (target.num_experts,) if target.num_experts else ()
    a_lead = () if target.shared == "A" else experts
    b_lead = () if target.shared == "B" else experts
    return (*a_lead, rank, target.in_features), (*b_lead, target.out_features, rank)


def is_trained(target: LoraTarget, config: LoraConfig) -> bool:
    return {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}[target.group]


def check_dora(targets: Iterable[LoraTarget], config: LoraConfig) -> None:
    """Refuse DoRA for experts: they share a factor, and PEFT, whose definition it is, has none for them."""
    stacked = next((target for target in targets if target.num_experts and is_trained(target, config)), None)
    if config.use_dora is True and stacked is not None:
        raise Unsupported(
            f"use_dora is not available for the experts {stacked.module!r}: PEFT defines no DoRA for stacked weights;"
            " train_mlp=False leaves them out"
        )


def init_adapter(targets: Iterable[LoraTarget], config: LoraConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Create float32 pairs by target name: A uniform in ±1/sqrt(I) from the seed and the target's name, B zero.

    A target's A does not depend on which other targets are trained.
    """
    if not 1 <= config.rank <= MAX_RANK:
        raise InvalidInput(f"LoRA rank {config.rank!r} is not between 1 and {MAX_RANK}")
    seed = secrets.randbits(64) if config.seed is None else config.seed
    pairs = {}
    for target in targets:
        if is_trained(target, config):
            a_shape, b_shape = shapes(target, config.rank)
            digest = hashlib.sha256(f"{seed}/{target.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            bound = target.in_features**-0.5
            pairs[target.name] = (
                torch.empty(a_shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator),
                torch.zeros(b_shape, dtype=torch.float32),
            )
    if not pairs:
        raise InvalidInput("nothing to train: one of train_attn, train_mlp and train_unembed must be true")
    return pairs


def find_targets(model: nn.Module) -> list[LoraTarget]:
    """Find all targets of a transformers causal language model, in the order of its modules, the output head last.

    Refuses a model with no target in one of the groups: training that group would silently do nothing.
    """
    kind, names = type(model).__name__, {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise ModelRefused(f"{kind} has {type(head).__name__} where an nn.Linear output head belongs")
    decoder = model.get_decoder()  # type: ignore[operator]
    if decoder is head:  # where the head is called 'decoder'
        decoder = model.base_model
    targets = [
        target
        for name, module in decoder.named_modules(prefix=names[id(decoder)])
        if (group := group_of(name)) is not None
        for target in _targets_of_module(name, module, group, model)
    ]
    for group in ("attn", "mlp"):
        if not any(target.group == group for target in targets):
            raise ModelRefused(f"{kind} has no nn.Linear of group {group!r} in its decoder layers for LoRA to train")
    name = names[id(head)]
    return [*targets, LoraTarget(name, name, "unembed", head.in_features, head.out_features)]


def group_of(path: str) -> Group | None:
    """Return a module's group by the first known word of its path inside a decoder layer; ``None`` without one."""
    parts = path.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    for part in parts[layer + 1 :]:
        if _ATTENTION.search(part):
            return "attn"
        if _MLP.search(part):
            return "mlp"
    return None


def _targets_of_module(name: str, module: nn.Module, group: Group, model: nn.Module) -> Iterator[LoraTarget]:
    if isinstance(module, nn.Linear):
        if _is_router(name, module, model):
            return
        offset = 0
        for part, size in _parts(name, module, model):
            yield LoraTarget(f"{name}{part}", name, group, module.in_features, size, offset)
            offset += size
    elif group == "mlp" and any(p.dim() == 3 for p in module.parameters(recurse=False)):
        yield from _expert_targets(name, module, model)


def _is_router(name: str, linear: nn.Linear, model: nn.Module) -> bool:
    parts = name.split(".")
    if any("router" in part for part in parts) or "gate" in parts[:-1]:
        return True
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    counts = {value for key, value in vars(config).items() if _EXPERT_COUNT.match(key)}
    is_routing_gate = parts[-1] == "gate" and linear.out_features in counts
    return is_routing_gate or (parts[-1].endswith("gate") and linear.out_features == 1)


def _parts(name: str, linear: nn.Linear, model: nn.Module) -> list[tuple[str, int]]:
    """Return suffix and row count of each part of a linear weight; one part without suffix unless it is fused."""
    rows, last = linear.out_features, name.rsplit(".", 1)[-1]
    if last == "gate_up_proj" and rows % 2 == 0:
        return [(":gate", rows // 2), (":up", rows // 2)]
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if last == "qkv_proj" and heads and kv_heads:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if rows == (heads + 2 * kv_heads) * head_dim:
            return [(":q", heads * head_dim), (":k", kv_heads * head_dim), (":v", kv_heads * head_dim)]
    return [("", rows)]


def _expert_targets(name: str, experts: nn.Module, model: nn.Module) -> Iterator[LoraTarget]:
    """Find targets of experts that are stored as stacked weights and run through transformers' experts interface."""
    has_gate = getattr(experts, "has_gate", None)
    up = getattr(experts, "gate_up_proj" if has_gate else "up_proj", None)
    down = getattr(experts, "down_proj", None)
    if has_gate is None or not isinstance(up, Tensor) or not isinstance(down, Tensor):
        raise ModelRefused(
            f"the experts {name!r} of {type(model).__name__} are a {type(experts).__name__}, which does not use"
            " transformers' experts interface (gate_up_proj or up_proj, and down_proj), so they cannot be trained"
        )
    num_experts, *sizes = up.shape
    hidden, width = sizes if experts.is_transposed else reversed(sizes)
    inner = width // 2 if has_gate else width
    step = 1 if experts.is_concatenated or not has_gate else 2
    if has_gate:
        yield LoraTarget(f"{name}:gate", name, "mlp", hidden, inner, 0, num_experts, "A", step)
    offset = 0 if not has_gate else 1 if step == 2 else inner
    yield LoraTarget(f"{name}:up", name, "mlp", hidden, inner, offset, num_experts, "A", step)
    yield LoraTarget(f"{name}:down", name, "mlp", inner, hidden, 0, num_experts, "B")
