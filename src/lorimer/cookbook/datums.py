"""Training examples from token sequences and from conversations.

The server adds up ``weight * -logprob`` over all tokens of all examples. With ``mean`` the weights of an example add up
to 1, so that long answers count no more than short ones; with ``sum`` every trained token counts the same.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from lorimer import Datum, ModelInput
from lorimer.chat.conversation import Message, ToolSpec, TrainOn
from lorimer.chat.images import first_positions, ids_of
from lorimer.cookbook.renderers import Renderer
from lorimer.errors import InvalidInput, TooLarge

Reduction = Literal["mean", "sum"]


def datum_from_tokens(tokens: ModelInput | Sequence[int], weights: ArrayLike, reduction: Reduction = "mean") -> Datum:
    """An example that predicts each token from those before it; ``weights`` has one number for each token.

    The first token is predicted from nothing, so its weight does not count. An image is as many tokens as its chunk
    expects, and is given weight 0 for each, as renderers do.
    """
    whole = tokens if isinstance(tokens, ModelInput) else ModelInput.from_ints(tokens)
    ids = ids_of(whole)
    weight = np.asarray(weights, np.float32)
    if weight.shape != ids.shape:
        raise InvalidInput(f"there are {weight.size} weights for {ids.size} tokens; one for each is accepted")
    weight = weight[1:]
    if not weight.any():
        raise InvalidInput(f"none of the {ids.size} tokens after the first has a weight; there is nothing to train on")
    if reduction == "mean":
        weight = weight / weight.sum()
    return Datum(
        model_input=first_positions(whole, len(ids) - 1),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": weight},  # type: ignore[dict-item]
    )


def conversation_to_datum(
    messages: Sequence[Message],
    renderer: Renderer,
    max_length: int | None = None,
    train_on: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
    tools: Sequence[ToolSpec] | None = None,
    reduction: Reduction = "mean",
) -> Datum:
    """The one example of a conversation; what is beyond ``max_length`` tokens is cut off."""
    tokens, weights = renderer.build_supervised_example(messages, train_on, tools)
    _check_trained([weights], train_on)
    datum = _datum_within(tokens, weights, max_length, reduction)
    if datum is None:
        raise TooLarge(
            f"the first {max_length} of {tokens.length} tokens of the conversation hold nothing to train on; "
            "a larger max_length is needed"
        )
    return datum


def conversation_to_datums(
    messages: Sequence[Message],
    renderer: Renderer,
    max_length: int | None = None,
    train_on: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
    tools: Sequence[ToolSpec] | None = None,
    reduction: Reduction = "mean",
) -> list[Datum]:
    """As many examples as the chat template needs; one with nothing to train on within ``max_length`` is left out."""
    examples = renderer.build_supervised_examples(messages, train_on, tools)
    _check_trained([weights for _, weights in examples], train_on)
    datums = [_datum_within(tokens, weights, max_length, reduction) for tokens, weights in examples]
    return [datum for datum in datums if datum is not None]


def _check_trained(weights: Sequence[ArrayLike], train_on: TrainOn) -> None:
    """Refuse examples without any weight, which renderers of the official cookbook's formats give."""
    if not any(np.any(one) for one in weights):
        raise InvalidInput(f"no message is trained on with {str(train_on)!r}; at least one is needed")


def _datum_within(tokens: ModelInput, weights: ArrayLike, max_length: int | None, reduction: Reduction) -> Datum | None:
    """Ends with the last token that has a weight: what a template writes after it is computed for nothing."""
    weight = np.asarray(weights)[:max_length]
    if not weight[1:].any():
        return None
    length = int(np.flatnonzero(weight)[-1]) + 1
    return datum_from_tokens(first_positions(tokens, length), weight[:length], reduction)


def num_tokens(data: Sequence[Datum]) -> int:
    """How many tokens the model reads."""
    return sum(datum.model_input.length for datum in data)


def mean_nll(data: Sequence[Datum], logprobs: Sequence[ArrayLike]) -> float:
    """The weighted mean of ``-logprob`` over all tokens of all examples."""
    weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in data]
    total = sum(
        float(-(np.asarray(logprob, np.float64) * weight).sum())
        for logprob, weight in zip(logprobs, weights, strict=True)
    )
    return total / sum(float(weight.sum(dtype=np.float64)) for weight in weights)
