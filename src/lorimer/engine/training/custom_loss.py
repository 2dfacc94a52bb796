"""Losses uploaded as operation graphs: checked once when registered, then run on the logprobs of each datum.

A graph is data, in the form ``torch.fx`` traces and the Tinker protocol encodes; no Python is evaluated and nothing is
called that ``custom_loss_calls`` does not list. The cost of every call is charged before it runs, which bounds time and
memory. Graphs run on the CPU wherever the model is: an index out of range then fails one datum, whereas on a GPU it
would stop the engine.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lorimer.engine.training.custom_loss_calls import ATTRIBUTES, FUNCTIONS, MAX_INT_BITS, METHODS, Call, read
from lorimer.errors import InvalidInput, Unsupported

MAX_INPUTS = 16
MAX_NODES = 1024
MAX_VALUES = 2**16
"""Maximum encoded arguments of a graph, including those inside lists."""
MAX_DEPTH = 8
MAX_ELEMENTS = 2**27
"""Maximum tensor elements that one evaluation may read and make, which bounds memory."""
MAX_ELEMENTS_PER_INPUT = 2**14
"""The same for each number the graph is given, so that a loss takes time in proportion to its data."""

_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NODE_FIELDS = {"op", "name", "target", "args", "kwargs"}
_OFF_ONLY = frozenset({"out", "inplace", "generator", "pin_memory", "requires_grad", "sparse_grad"})
"""Keyword arguments that ``torch.fx`` spells out with their defaults; any other value is refused."""
_STRINGS = {"none", "mean", "sum", "batchmean", "prod", "amax", "amin", "floor", "trunc", "tanh", "fro", "cpu"}
_STRINGS |= {"constant", "replicate", "reflect", "circular", "linear", "lower", "higher", "nearest", "midpoint"}
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_DEVICES = ("cpu", "mps", "mps:0", "cuda", *(f"cuda:{index}" for index in range(16)))
_CONSTANTS: Mapping[Any, Mapping[Any, Any]] = {
    "ellipsis": {True: Ellipsis},
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
    "dtype": {name: getattr(torch, name) for name in _DTYPES},
    "device": dict.fromkeys(_DEVICES, torch.device("cpu")),  # where graphs run
    "layout": {"strided": torch.strided},
    "memory_format": {name: getattr(torch, name) for name in ("contiguous_format", "preserve_format")},
}
_CALL_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True)
class _Ref:
    index: int
    """Of the value among the graph's inputs and earlier results."""


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    target: str
    call: Call
    is_method: bool
    args: tuple[Any, ...]
    """With ``_Ref`` where earlier values go."""
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class CustomLoss:
    """A checked graph that maps the logprobs and inputs of one datum to a scalar loss and metrics."""

    inputs: tuple[tuple[str, int], ...]
    """Names and ranks of its parameters; ``logprobs`` comes first."""
    steps: tuple[_Step, ...] = field(repr=False)
    loss: _Ref
    metrics: Mapping[str, _Ref]

    @staticmethod
    def parse(inputs: Sequence[tuple[str, int]], graph: Mapping[str, Any]) -> "CustomLoss":
        """Check an encoded graph; raises ``Unsupported`` for a call that is not listed, else ``InvalidInput``."""
        parameters = _check_parameters(inputs)
        if not isinstance(graph, Mapping) or set(graph) != {"format", "nodes"} or graph["format"] != 1:
            raise InvalidInput("the graph of a custom loss has 'format' 1 and 'nodes'")
        nodes = graph["nodes"]
        if not isinstance(nodes, list) or not 1 <= len(nodes) <= MAX_NODES:
            raise InvalidInput(f"the graph of a custom loss has a list of 1 to {MAX_NODES} nodes")
        return _Reader(parameters).read(nodes)

    def evaluate(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return loss (0-d float64 on the CPU), its gradient (like ``logprobs``), and metrics of one datum.

        A call that fails, a loss that is not a finite scalar or does not depend on the logprobs, and a gradient that is
        not finite raise ``InvalidInput``.
        """
        with torch.inference_mode(False), torch.enable_grad():
            leaf = logprobs.detach().to("cpu", copy=True).requires_grad_()
            values: list[Any] = [leaf, *(inputs[name].detach().to("cpu", copy=True) for name, _ in self.inputs[1:])]
            self._run(values)
            loss = self._check_loss(values[self.loss.index])
            try:
                (gradient,) = torch.autograd.grad(loss, leaf)
            except RuntimeError as error:
                raise InvalidInput(f"the gradient of the custom loss cannot be computed: {_brief(error)}") from error
        if not gradient.isfinite().all():
            index = (~gradient.isfinite()).nonzero()[0].tolist()
            raise InvalidInput(f"the gradient of the custom loss is not finite at logprobs{index}")
        metrics = {name: _metric_value(name, values[ref.index]) for name, ref in self.metrics.items()}
        return loss.detach().double(), gradient.to(logprobs), metrics

    def _run(self, values: list[Any]) -> None:
        max_elements = min(MAX_ELEMENTS, 2**16 + MAX_ELEMENTS_PER_INPUT * read(values, {}))
        num_elements = 0
        for step in self.steps:
            args = [_resolve(argument, values) for argument in step.args]
            kwargs = {name: _resolve(argument, values) for name, argument in step.kwargs.items()}
            try:
                if step.is_method and not (args and isinstance(args[0], Tensor)):
                    raise TypeError("a method of tensors was called on something else")
                num_elements += read(args, kwargs) + step.call.cost(args, kwargs)
                if num_elements > max_elements:
                    raise ValueError(f"the loss of this datum takes more than the {max_elements} elements it may")
                values.append(_check_result(step.call.function(*args, **kwargs)))
            except _CALL_ERRORS as error:
                raise InvalidInput(f"custom loss node {step.name!r} ({step.target}): {_brief(error)}") from error

    def _check_loss(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
            got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidInput(f"the custom loss returned {got}; a floating-point scalar tensor is accepted")
        if not loss.requires_grad:
            raise InvalidInput("the custom loss does not depend on logprobs in a way that has a gradient")
        if not loss.isfinite():
            raise InvalidInput(f"the custom loss returned {loss.item()!r}; a finite scalar is accepted")
        return loss


def combine_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of an operation's datums: sums, and means over the datums."""
    return {
        name: math.fsum(each[name] for each in metrics) / (len(metrics) if name.endswith(":mean") else 1)
        for name in metrics[0]
    }


def _resolve(argument: Any, values: Sequence[Any]) -> Any:
    if isinstance(argument, _Ref):
        return values[argument.index]
    if isinstance(argument, list | tuple):
        return type(argument)(_resolve(item, values) for item in argument)
    if isinstance(argument, slice):
        return slice(*(_resolve(item, values) for item in (argument.start, argument.stop, argument.step)))
    return argument


def _check_result(result: Any) -> Any:
    if not isinstance(result, Tensor | int | float | tuple | list | torch.dtype | torch.device):
        raise TypeError(f"a result of type {type(result).__name__} cannot be used")
    if isinstance(result, int) and result.bit_length() > MAX_INT_BITS:
        raise OverflowError(f"integers of at most {MAX_INT_BITS} bits are accepted")
    return result


def _metric_value(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    if not isinstance(value, int | float):
        raise InvalidInput(f"metric {name!r} of the custom loss is not a scalar")
    return float(value)


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _check_parameters(inputs: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    parameters = tuple((name, rank) for name, rank in inputs)
    if not 1 <= len(parameters) <= MAX_INPUTS:
        raise InvalidInput(f"a custom loss has {len(parameters)} inputs; 1 to {MAX_INPUTS} are accepted")
    if parameters[0] not in (("logprobs", 1), ("logprobs", 2)):
        raise InvalidInput(
            f"the first input of a custom loss is {parameters[0]!r}; logprobs of rank 1 or 2 is accepted"
        )
    for index, (name, rank) in enumerate(parameters):
        if not _INPUT_NAME.fullmatch(name) or name in dict(parameters[:index]):
            raise InvalidInput(
                f"input {index} of the custom loss is named {name!r}; unique lowercase names are accepted"
            )
        if rank not in (0, 1, 2):
            raise InvalidInput(f"input {name!r} of the custom loss has rank {rank!r}; 0, 1 and 2 are accepted")
    return parameters


# ── reading a graph ───────────────────────────────────────────────────────────────────────────────────


class _Reader:
    """Turns the nodes of one graph, in order, into steps; a reference must be to a node already read."""

    def __init__(self, parameters: tuple[tuple[str, int], ...]) -> None:
        self.parameters = parameters
        self.refs: dict[str, _Ref] = {}
        self.reaches_logprobs: list[bool] = []
        self.num_values = 0
        self.node_name = ""

    def read(self, nodes: Sequence[Any]) -> CustomLoss:
        steps: list[_Step] = []
        for index, node in enumerate(nodes):
            self._check_node(index, node)
            op, name, target = node["op"], node["name"], node["target"]
            args, kwargs = node.get("args", []), node.get("kwargs", {})
            if index < len(self.parameters):
                expected = self.parameters[index][0]
                if (op, target, args, kwargs) != ("placeholder", expected, [], {}):
                    raise self._refusal(
                        f"is a {op} of {target!r}; a placeholder of {expected!r}, bare, is accepted here"
                    )
                self.reaches_logprobs.append(index == 0)
            elif index == len(nodes) - 1:
                return self._read_output(op, args, kwargs, tuple(steps))
            else:
                steps.append(self._read_call(op, target, args, kwargs))
            self.refs[name] = _Ref(len(self.refs))
        raise InvalidInput("the graph of the custom loss has no output node")

    def _refusal(self, message: str, error: type[InvalidInput] = InvalidInput) -> InvalidInput:
        return error(f"custom loss node {self.node_name!r} {message}")

    def _check_node(self, index: int, node: Any) -> None:
        self.node_name = f"#{index}"
        if not isinstance(node, Mapping) or not {"op", "name", "target"} <= set(node) <= _NODE_FIELDS:
            raise self._refusal(f"is not an object with {', '.join(sorted(_NODE_FIELDS))}")
        if not all(isinstance(node[key], str) and len(node[key]) <= 256 for key in ("op", "name", "target")):
            raise self._refusal("has an op, name or target that is not a short string")
        if not isinstance(node.get("args", []), list) or not isinstance(node.get("kwargs", {}), Mapping):
            raise self._refusal("has args that are not a list or kwargs that are not an object")
        self.node_name = node["name"]
        if node["name"] in self.refs:
            raise self._refusal("has the name of an earlier node")

    def _read_call(self, op: str, target: str, args: list[Any], kwargs: Mapping[str, Any]) -> _Step:
        calls = {"call_function": FUNCTIONS, "call_method": METHODS}.get(op)
        if calls is None:
            raise self._refusal(f"is a {op}; call_function and call_method are accepted", Unsupported)
        if target not in calls:
            hint = "; functions that change a tensor in place never are" if target.endswith("_") else ""
            raise self._refusal(f"calls {target!r}, which is not among what a custom loss may call{hint}", Unsupported)
        call = calls[target]
        self.reaches_logprobs.append(False)
        if target.endswith("getattr"):
            decoded = self._decode_attribute(args, kwargs)
        elif target.endswith("einsum") and args and isinstance(args[0], str) and len(args[0]) <= 256:
            decoded = (args[0], *(self._decode(argument) for argument in args[1:]))
        else:
            decoded = tuple(self._decode(argument) for argument in args)
        if call.max_args is not None and len(args) > call.max_args:
            raise self._refusal(f"gives {target} {len(args)} arguments by position; {call.max_args} are accepted")
        for name, value in kwargs.items():
            if name in _OFF_ONLY and value is not None and value is not False:
                raise self._refusal(f"gives {target} the argument {name!r}, which is not accepted", Unsupported)
        named = {name: self._decode(argument) for name, argument in kwargs.items()}
        return _Step(self.node_name, target, call, op == "call_method", decoded, named)

    def _decode_attribute(self, args: list[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if len(args) != 2 or kwargs or not isinstance(args[1], str):
            raise self._refusal("calls getattr; a tensor and the name of an attribute are accepted")
        if args[1] not in ATTRIBUTES:
            accepted = ", ".join(sorted(ATTRIBUTES))
            raise self._refusal(f"reads attribute {_shorten(args[1])}; accepted: {accepted}", Unsupported)
        return self._decode(args[0]), args[1]

    def _read_output(self, op: str, args: list[Any], kwargs: Mapping[str, Any], steps: tuple[_Step, ...]) -> CustomLoss:
        if op != "output" or kwargs or len(args) != 1:
            raise self._refusal(f"ends the graph as a {op}; an output with one argument is accepted")
        pair = args[0].get("tuple") if isinstance(args[0], Mapping) else args[0]
        if not isinstance(pair, list) or len(pair) != 2:
            raise self._refusal("returns something else than (loss, metrics)")
        self.reaches_logprobs.append(False)
        loss = self._decode(pair[0])
        if not isinstance(loss, _Ref) or not self.reaches_logprobs[loss.index]:
            raise self._refusal("returns a loss that does not depend on logprobs")
        metrics = pair[1].get("dict") if isinstance(pair[1], Mapping) and len(pair[1]) == 1 else None
        if not isinstance(metrics, Mapping):
            raise self._refusal("returns metrics that are not a dict")
        refs = {}
        for name, value in metrics.items():
            if not isinstance(name, str) or not _METRIC_NAME.fullmatch(name):
                metric = _shorten(name)
                raise self._refusal(f"returns metric {metric}; custom/<name>:sum and custom/<name>:mean are accepted")
            refs[name] = self._decode(value)
            if not isinstance(refs[name], _Ref):
                raise self._refusal(f"returns metric {name!r} that is not a node")
        return CustomLoss(self.parameters, steps, loss, refs)

    def _decode(self, value: Any, depth: int = 0) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES or depth > MAX_DEPTH:
            raise self._refusal(f"goes beyond {MAX_VALUES} arguments or {MAX_DEPTH} levels of them")
        if isinstance(value, list):
            return [self._decode(item, depth + 1) for item in value]
        if isinstance(value, Mapping):
            return self._decode_object(value, depth)
        if value is None or isinstance(value, float) or (isinstance(value, str) and value in _STRINGS):
            return value
        if isinstance(value, int) and value.bit_length() <= MAX_INT_BITS:
            return value
        raise self._refusal(f"has argument {_shorten(value)}, which is not accepted")

    def _decode_object(self, value: Mapping[Any, Any], depth: int) -> Any:
        kind, content = next(iter(value.items())) if len(value) == 1 else (None, None)
        if kind == "ref" and isinstance(content, str):
            if content not in self.refs:
                raise self._refusal(f"refers to {_shorten(content)}, which is no earlier node")
            ref = self.refs[content]
            self.reaches_logprobs[-1] |= self.reaches_logprobs[ref.index]
            return ref
        if kind in ("tuple", "slice") and isinstance(content, list) and (kind == "tuple" or len(content) == 3):
            items = [self._decode(item, depth + 1) for item in content]
            return tuple(items) if kind == "tuple" else slice(*items)
        if kind in _CONSTANTS and isinstance(content, str | bool) and content in _CONSTANTS[kind]:
            return _CONSTANTS[kind][content]
        raise self._refusal(f"has argument {_shorten(kind)}: {_shorten(content)}, which is not accepted")


def _shorten(value: Any) -> str:
    if isinstance(value, str | float):
        return repr(value)[:80]
    return f"of {value.bit_length()} bits" if isinstance(value, int) else f"of type {type(value).__name__}"
