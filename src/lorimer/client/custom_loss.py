"""Losses that run in the user's program: a forward pass, the loss and its gradient here, then a backward pass.

The backward pass is ``cross_entropy`` with the weights ``-d loss / d logprobs``, whose gradient is that of the loss. A
traced loss that the server holds takes one pass there instead.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lorimer import types
from lorimer.client import tracing
from lorimer.client.checks import check_data
from lorimer.client.futures import APIFuture
from lorimer.client.tracing import LossHandle
from lorimer.types.extras import load_torch

if TYPE_CHECKING:
    from lorimer.client.training import TrainingClient

CustomLossFn = Callable[[list[types.Datum], list[Any]], tuple[Any, dict[str, float]]]
"""Takes the data and a tensor of logprobs for each datum; gives the loss and metrics."""


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
        tracing.check_inputs(loss_fn, data)
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
        loss, metrics = tracing.run(custom.loss_fn, custom.data, logprobs_list)
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
