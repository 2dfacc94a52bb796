"""Custom losses: traced into a graph that the server runs, or run in the user's program.

``trace`` makes a graph of a loss of one datum with torch.fx. What a graph may hold is checked here, so that mistakes
show where the loss is written; the server checks again. A loss that runs here takes a forward pass, the loss and its
gradient in this process, then a backward pass: ``cross_entropy`` with the weights ``-d loss / d logprobs``, whose
gradient is that of the loss. torch is loaded only when a loss is traced or run.
"""

import builtins
import hashlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lorimer import types
from lorimer.client.futures import APIFuture
from lorimer.client.submit import check_data
from lorimer.types import CustomLossGraph, CustomLossInput, CustomLossInputRank, CustomLossNode, Datum
from lorimer.types.extras import TORCH, load, load_torch

if TYPE_CHECKING:
    from lorimer.client.training import TrainingClient


PerDatumLossFn = Callable[..., tuple[Any, Mapping[str, Any]]]
"""``fn(logprobs, *inputs) -> (loss, metrics)``, tensors all; the inputs are named as keys of ``loss_fn_inputs``."""

CustomLossFn = Callable[[list[types.Datum], list[Any]], tuple[Any, dict[str, float]]]
"""Takes the data and a tensor of logprobs for each datum; gives the loss and metrics."""

MODULES = ("torch", "math", "operator", "_operator")
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
MAX_INPUTS = 16
LEAVES_TORCH = {"item", "numpy", "tolist"}
PURPOSE = "a custom loss"


@dataclass(frozen=True)
class LossHandle:
    """A traced loss, for ``forward_backward_custom`` of the session that made it."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    """``logprobs``, then the keys of ``loss_fn_inputs`` that the loss reads, each with its rank."""
    session_id: str
    graph: Any = field(repr=False, compare=False)
    """A ``torch.fx.GraphModule``; it is what runs, not the function it came from."""
    loss_id: str | None = None
    """The server's name for the loss; ``None`` if it runs here."""

    @property
    def key(self) -> str:
        """The same for the same graph and inputs."""
        return hashlib.sha256(f"{self.graph.code}{self.inputs!r}".encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.inputs[1:])


def trace(fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank], session_id: str) -> LossHandle:
    """A handle, or a ``ValueError`` that says what of the loss cannot be traced."""
    fx = load("torch.fx", PURPOSE, TORCH)
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _inputs(name, fn, input_ranks)
    try:
        graph = fx.symbolic_trace(fn)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be traced: {error}; a custom loss does not branch on values of tensors, and calls only "
            "torch and math"
        ) from error
    for node in graph.graph.nodes:
        _check_node(name, node, fx.Node)
    return LossHandle(name, inputs, session_id, graph)


def _inputs(
    name: str, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
) -> tuple[CustomLossInput, ...]:
    parameters = list(inspect.signature(fn).parameters.values())
    names = [parameter.name for parameter in parameters]
    if not names or names[0] != "logprobs":
        raise ValueError(f"{name} takes {', '.join(names) or 'nothing'}; the first parameter must be logprobs")
    if len(names) > MAX_INPUTS:
        raise ValueError(f"{name} takes {len(names)} parameters; at most {MAX_INPUTS} are accepted")
    for parameter in parameters:
        is_plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if not is_plain or parameter.default is not parameter.empty or not NAME.fullmatch(parameter.name):
            raise ValueError(
                f"{name} has the parameter {str(parameter)!r}; accepted are positional ones without a default, named "
                "in lower case as keys of loss_fn_inputs"
            )
    if set(input_ranks) != set(names):
        raise ValueError(f"input_ranks has {sorted(input_ranks)}; a rank for each of {names} is accepted")
    if input_ranks["logprobs"] not in (1, 2):
        raise ValueError(f"logprobs has rank {input_ranks['logprobs']!r}; 1 and 2 are accepted")
    return tuple(CustomLossInput(name=item, rank=input_ranks[item]) for item in names)


def _check_node(name: str, node: Any, node_type: type) -> None:
    match node.op:
        case "call_function":
            module = getattr(node.target, "__module__", None) or ""
            if node.target is not builtins.getattr and module.split(".")[0] not in MODULES:
                called = getattr(node.target, "__qualname__", node.target)
                raise ValueError(f"{name} calls {called} of {module or 'no module'}; only torch and math are accepted")
        case "call_method":
            _check_method(name, node.target)
        case "call_module":
            raise ValueError(f"{name} calls the module {node.target!r}; functions of torch are accepted")
        case "get_attr":
            raise ValueError(f"{name} holds the tensor {node.target!r}; what a loss reads is given in loss_fn_inputs")
        case "output":
            _check_output(name, node.args[0], node_type)


def _check_method(name: str, method: str) -> None:
    if not hasattr(load_torch(PURPOSE).Tensor, method):
        raise ValueError(f"{name} calls {method!r}, which tensors do not have")
    if method == "backward":
        raise ValueError(f"{name} calls backward(); return the loss, the gradient is taken for you")
    if method in LEAVES_TORCH:
        raise ValueError(f"{name} calls {method}(); values, and metrics too, must stay tensors")


def _check_output(name: str, output: Any, node_type: type) -> None:
    if not (isinstance(output, tuple | list) and len(output) == 2 and isinstance(output[1], dict)):
        raise ValueError(f"{name} must return (loss, metrics), metrics being a dict")
    loss, metrics = output
    if not isinstance(loss, node_type):
        raise ValueError(f"{name} returns the loss {loss!r}; a tensor is accepted")
    for key, value in metrics.items():
        if not (isinstance(key, str) and METRIC.fullmatch(key)):
            raise ValueError(f"{name} has the metric {key!r}; accepted are custom/<name>:sum and custom/<name>:mean")
        if not isinstance(value, node_type):
            raise ValueError(f"{name} has {value!r} as metric {key!r}; a tensor is accepted")


# ── the graph as plain data ───────────────────────────────────────────────────────────────────────────


def encode_graph(handle: LossHandle) -> CustomLossGraph:
    node_type = load("torch.fx", PURPOSE, TORCH).Node
    qualified_name = load("torch.fx.node", PURPOSE, TORCH)._get_qualified_name
    nodes = []
    for node in handle.graph.graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            target = qualified_name(node.target)
            if target.startswith("_operator."):
                target = target[1:]  # the public name of the same module
        nodes.append(
            CustomLossNode(
                op=node.op,
                name=node.name,
                target=target,
                args=[_encode(handle.name, item, node_type) for item in node.args],
                kwargs={key: _encode(handle.name, item, node_type) for key, item in node.kwargs.items()},
            )
        )
    return CustomLossGraph(nodes=nodes)


def _encode(name: str, value: Any, node_type: type) -> Any:
    """JSON as it is; what JSON lacks becomes an object of one key."""
    if isinstance(value, node_type):
        return {"ref": value.name}  # type: ignore[attr-defined]
    match value:
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case slice():
            return {"slice": [_encode(name, item, node_type) for item in (value.start, value.stop, value.step)]}
        case list():
            return [_encode(name, item, node_type) for item in value]
        case tuple():
            return {"tuple": [_encode(name, item, node_type) for item in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: _encode(name, item, node_type) for key, item in value.items()}}
    if value is ...:
        return {"ellipsis": True}
    kind = type(value).__name__
    if type(value).__module__ == "torch" and kind in ("dtype", "device", "layout", "memory_format"):
        return {kind: str(value).removeprefix("torch.")}
    raise ValueError(f"{name} uses a {kind} as an argument, which cannot be sent to the server")


# ── running here ──────────────────────────────────────────────────────────────────────────────────────


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Every datum must have what the loss reads; logprobs are shaped as target_tokens."""
    for index, datum in enumerate(data):
        for item in handle.inputs:
            key = "target_tokens" if item.name == "logprobs" else item.name
            tensor = datum.loss_fn_inputs.get(key)
            if tensor is None:
                raise ValueError(f"data[{index}] has no loss_fn_inputs[{key!r}], which the loss {handle.name!r} reads")
            rank = len(tensor.dense_shape)
            if rank != item.rank:
                raise ValueError(
                    f"data[{index}]: {key} has rank {rank}; the loss {handle.name!r} was traced with {item.rank}"
                )


def run_traced(handle: LossHandle, data: Sequence[Datum], logprobs_list: Sequence[Any]) -> tuple[Any, dict[str, float]]:
    """The sum of the losses; metrics are summed, or averaged over datums, as their names say."""
    losses, sums = [], dict[str, float]()
    for datum, logprobs in zip(data, logprobs_list, strict=True):
        loss, metrics = handle.graph(logprobs, *(datum.loss_fn_inputs[name].to_torch() for name in handle.input_names))
        if loss.ndim:
            raise ValueError(
                f"the loss {handle.name!r} gives a tensor of shape {list(loss.shape)}; a scalar is accepted"
            )
        losses.append(loss)
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(value.detach())
    means = {key: value / len(losses) if key.endswith(":mean") else value for key, value in sums.items()}
    return sum(losses), means


# ── a pass with a loss that runs here ───────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class CustomPass:
    """A custom loss whose forward pass is under way."""

    data: list[types.Datum]
    loss_fn: CustomLossFn | LossHandle
    forward: APIFuture[types.ForwardBackwardOutput]


def begin(
    client: "TrainingClient", data: list[types.Datum], loss_fn: CustomLossFn | LossHandle, loss_type_input: str | None
) -> CustomPass | APIFuture[types.ForwardBackwardOutput]:
    """Start the forward pass, or the only one if the server has the loss."""
    _check_loss_type_input(loss_type_input)
    if isinstance(loss_fn, LossHandle):
        if loss_fn.session_id != client.holder.session_id:
            raise ValueError(
                f"the loss {loss_fn.name!r} was made in session {loss_fn.session_id}, and can be used only there"
            )
        check_inputs(loss_fn, data)
        if loss_fn.loss_id is not None:
            return client.forward_backward(data, "custom", {"loss_id": loss_fn.loss_id})
    elif not callable(loss_fn):
        raise TypeError(f"loss_fn is {loss_fn!r}; a function or a LossHandle is accepted")
    load_torch("forward_backward_custom")
    check_data(data)
    forward = client.forward([_forward_datum(datum, index) for index, datum in enumerate(data)], "cross_entropy")
    return CustomPass(data, loss_fn, forward)


def end(
    client: "TrainingClient", custom: CustomPass, output: types.ForwardBackwardOutput
) -> APIFuture[types.ForwardBackwardOutput]:
    """Compute the loss, and start the backward pass."""
    torch = load_torch("forward_backward_custom")
    logprobs_list = [torch.tensor(one["logprobs"].to_numpy()).requires_grad_(True) for one in output.loss_fn_outputs]
    if isinstance(custom.loss_fn, LossHandle):
        loss, metrics = run_traced(custom.loss_fn, custom.data, logprobs_list)
    else:
        loss, metrics = custom.loss_fn(custom.data, logprobs_list)
    value = float(loss.detach().sum().item())
    loss.backward()
    weighted = []
    for index, (datum, logprobs) in enumerate(zip(custom.data, logprobs_list, strict=True)):
        if logprobs.grad is None:
            raise ValueError(f"the loss does not depend on the logprobs of data[{index}], so it has no gradient for it")
        targets = datum.loss_fn_inputs["target_tokens"]
        weighted.append(replace(datum, loss_fn_inputs={"target_tokens": targets, "weights": -logprobs.grad}))

    def finish(surrogate: types.ForwardBackwardOutput) -> types.ForwardBackwardOutput:
        rest = dict(surrogate.metrics)
        surrogate_loss = rest.pop("loss:sum")
        return replace(surrogate, metrics=rest | metrics | {"loss:sum": value, "surrogate_loss:sum": surrogate_loss})

    backward = client.forward_backward(weighted, "cross_entropy")

    async def finished() -> types.ForwardBackwardOutput:
        return finish(await backward)

    return client.holder.connection.run(finished())


def _forward_datum(datum: types.Datum, index: int) -> types.Datum:
    """Only what cross_entropy reads."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise ValueError(f"data[{index}] has no target_tokens; the logprobs of a custom loss are theirs")
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        weights = types.TensorData([0.0] * len(targets.values.ravel()), "float32", targets.values.shape)
        if targets.csr is not None:
            weights = types.TensorData(weights.values, "float32", targets.shape, *targets.csr)
    return replace(datum, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def _check_loss_type_input(loss_type_input: str | None) -> None:
    if loss_type_input is None:
        return
    if loss_type_input != "logprobs":
        raise ValueError(f"loss_type_input is {loss_type_input!r}; 'logprobs' is accepted")
    warnings.warn("loss_type_input has no effect: a loss always takes logprobs", DeprecationWarning, stacklevel=4)
