"""Custom losses that a user traced and uploaded: their graph as plain data.

The engine decides what a graph may contain.
"""

from typing import Any, Literal

from pydantic import Field

from lorimer.types.base import Counter, Request, Response

CustomLossInputRank = Literal[0, 1, 2]
CustomLossNodeOp = Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]


class CustomLossInput(Request):
    name: str
    """``logprobs``, or a key of ``loss_fn_inputs``."""
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """One node of a graph.

    Arguments are JSON values; anything else is an object with one key, such as ``{"ref": name}``.
    """

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CustomLossGraph(Request):
    """The nodes in execution order."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Request):
    session_id: str
    custom_loss_seq_id: Counter
    name: str
    inputs: list[CustomLossInput]
    """``logprobs`` comes first."""
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Response):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
