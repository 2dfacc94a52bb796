"""Which parameters of a model belong to which of the groups that a full run trains or leaves alone.

Every parameter has one group: attention (with its biases and sinks), MLP (with experts and routers), norms, the
embedding of tokens and positions, and the output head. A head that is tied to the embedding is one tensor.
"""

from typing import Literal, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel

from lorimer.engine.adapters.lora import group_of
from lorimer.engine.messages import FullConfig
from lorimer.errors import InvalidInput, ModelRefused

FullGroup = Literal["attn", "mlp", "unembed", "embed", "norms"]


def find_groups(model: PreTrainedModel) -> dict[str, FullGroup]:
    """Return the group of each parameter by its name; a tied one has the name of the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    groups: dict[str, FullGroup] = {}
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if any(parameter is one for one in embedding.parameters()):
            groups[name] = "embed"
        elif module is head:
            groups[name] = "unembed"
        else:
            groups[name] = _group_in_layers(name, module, model)
    return groups


def _group_in_layers(name: str, module: nn.Module, model: PreTrainedModel) -> FullGroup:
    if "norm" in type(module).__name__.lower() or "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        return "norms"
    if isinstance(module, nn.Embedding):
        return "embed"
    if (group := group_of(name)) is not None:
        return group
    raise ModelRefused(
        f"{type(model).__name__} has a parameter {name!r}, which belongs to none of {', '.join(get_args(FullGroup))};"
        " full fine-tuning would not know whether to train it"
    )


def choose_parameters(model: PreTrainedModel, config: FullConfig) -> dict[str, Tensor]:
    """Return the parameters that a run trains, by name; refuse flags that contradict tied weights or train nothing."""
    wanted: dict[FullGroup, bool] = {
        "attn": config.train_attn,
        "mlp": config.train_mlp,
        "unembed": config.train_unembed,
        "embed": config.train_embed,
        "norms": config.train_norms,
    }
    if not any(wanted.values()):
        raise InvalidInput(f"nothing to train: one of {', '.join(f'train_{name}' for name in wanted)} must be true")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # Ranks that share a tied tensor have it in the embedding only.
    if (head.weight is None or head.weight is embedding.weight) and config.train_embed != config.train_unembed:
        raise InvalidInput(
            f"train_embed is {config.train_embed} and train_unembed {config.train_unembed}, but the output head of this"
            " model is its embedding, one tensor; accepted are both true or both false"
        )
    groups = find_groups(model)
    return {name: parameter for name, parameter in model.named_parameters() if wanted[groups[name]]}
