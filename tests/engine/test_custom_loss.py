"""Graphs traced and encoded by the official client give what the traced function gives; hostile graphs are refused."""

import gc
import math
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from lorimer.engine.messages import Datum, ForwardBackward, RegisterLoss, decode_command, encode
from lorimer.engine.training import custom_loss, custom_loss_calls
from lorimer.engine.training.custom_loss import CustomLoss, combine_metrics
from lorimer.engine.validation import check_operation
from lorimer.errors import InvalidInput, Unsupported


def register(function, **ranks):
    """Trace with the official client, send over our messages, parse."""
    handle = trace_loss(function, ranks, "session")
    graph = encode_graph(handle).model_dump()
    inputs: list[tuple[str, int]] = [(each.name, each.rank) for each in handle.inputs]
    message = RegisterLoss(request_id="r", loss_id="l", inputs=inputs, graph=graph)
    received = decode_command(encode(message))
    assert isinstance(received, RegisterLoss)
    return CustomLoss.parse(received.inputs, received.graph)


def make_values(ranks, length=13, width=5):
    generator = torch.Generator().manual_seed(3)
    shapes = {0: (), 1: (length,), 2: (length, width)}
    values = {name: torch.randn(shapes[rank], generator=generator) for name, rank in ranks.items()}
    values["logprobs"] = -values["logprobs"].abs()
    if "mask" in values:
        values["mask"] = (values["mask"] > 0).float()
    if "index" in values:
        values["index"] = torch.randint(0, length, (length,), generator=generator)
    return values


# ── what the official client sends ────────────────────────────────────────────────────────────────────


def reinforce(logprobs, advantages, mask):
    kept = logprobs * mask
    return -(kept * advantages).sum(), {"custom/tokens:sum": mask.sum(), "custom/logprob:mean": kept.mean()}


def clipped(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    surrogate = torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    is_clipped = (ratio < 0.8) | ~(ratio <= 1.2)
    return -surrogate.sum(), {"custom/clip_fraction:mean": is_clipped.float().mean()}


def preference(logprobs, reference, mask, beta):
    margin = beta * ((logprobs - reference) * (2 * mask - 1)).sum()
    return -F.logsigmoid(margin), {"custom/margin:mean": margin, "custom/accuracy:mean": (margin > 0).float()}


def distillation(logprobs, teacher):
    student = torch.log_softmax(logprobs, dim=-1)
    target = F.softmax(teacher, dim=-1)
    kl = F.kl_div(student, target, reduction="none").sum(dim=-1)
    return kl.mean() + 0.1 * F.smooth_l1_loss(student, teacher), {"custom/kl:mean": kl.mean()}


def sequence_ratio(logprobs, old, mask):
    count = mask.sum().clamp(min=1.0)
    log_ratio = ((logprobs.detach() - old) * mask).sum() / count
    ratio = torch.exp(log_ratio) * torch.exp(logprobs - logprobs.detach())
    return -(ratio * mask).sum(), {"custom/ratio:mean": torch.exp(log_ratio)}


def positions(logprobs, mask):
    length = logprobs.shape[0]
    weights = torch.arange(length, dtype=torch.float32) / max_of(length)
    tail = logprobs[length // 2 :].sum() + logprobs[-1] * 2 + logprobs[..., None][:, 0].mean()
    best = logprobs.max(dim=0).values + torch.sort(logprobs, descending=True)[0][:3].sum()
    padded = F.pad(logprobs[1:], (0, 1), value=-math.inf).masked_fill(mask == 0, 0.0)
    padded = torch.where(torch.isfinite(padded), padded, torch.zeros_like(padded))
    loss = (weights * logprobs).sum() / math.sqrt(length) + tail + best + padded.sum()
    return loss, {"custom/length:sum": logprobs.new_ones(()) * logprobs.numel(), "custom/n:sum": logprobs.size(0)}


def max_of(length):
    return torch.sym_max(length, 1)


def picking(logprobs, index, mask):
    picked = logprobs[index] + logprobs.gather(0, index) + torch.index_select(logprobs, 0, index)
    masked = logprobs[mask > 0].sum() + torch.masked_select(logprobs, mask.bool()).mean()
    groups = logprobs.new_zeros(logprobs.shape[0]).index_add(0, index, logprobs)
    stacked = torch.stack([picked, groups], dim=1)
    joined = torch.cat((picked, groups)).to(torch.float64).logsumexp(0)
    head, _, _ = (torch.unbind(stacked[:3]))[0], 0, 0
    return stacked.pow(2).sum() + masked + joined.float() + head.sum() + torch.einsum("i, i ->", picked, groups), {}


def algebra(logprobs, matrix):
    scores = matrix.T @ logprobs
    gram = torch.matmul(matrix.mT, matrix)
    outer = torch.outer(logprobs, logprobs)
    total = 0.0
    for power in range(1, 4):
        total += (scores**power).tanh().sum() / power
    return total + torch.norm(scores) + torch.linalg.vector_norm(gram) - outer.triu().mean(), {}


def special(logprobs, mask):
    x = torch.special.expit(logprobs) + torch.special.xlogy(mask, 2.0 - logprobs) + torch.special.log1p(mask)
    x = F.relu(x) + F.softplus(x) + F.gelu(x) + F.leaky_relu(x, 0.2) + F.elu(x) + F.silu(x)
    x = F.normalize(x, dim=0) + F.mse_loss(x, mask) + F.binary_cross_entropy_with_logits(x, mask)
    x = x + torch.cumsum(x, 0).nan_to_num(0.0) + torch.round(mask, decimals=2) + torch.full_like(x, 3.0)
    return x.std(unbiased=False) + torch.quantile(x, 0.3) + abs(x).amax() + (-x) @ mask + 2 ** mask.mean(), {}


RANKS = {"logprobs": 1, "teacher": 2, "matrix": 2, "beta": 0}
FUNCTIONS = [
    reinforce,
    clipped,
    preference,
    distillation,
    sequence_ratio,
    positions,
    picking,
    algebra,
    special,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_traced_losses_give_what_the_function_gives(function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    ranks = {name: RANKS.get(name, 1) for name in names}
    if function is distillation:
        ranks["logprobs"] = 2
    values = make_values(ranks)
    loss = register(function, **ranks)
    assert loss.inputs == tuple(ranks.items())
    leaf = values["logprobs"].clone().requires_grad_()
    expected, expected_metrics = function(leaf, *(values[name] for name in names[1:]))
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    before = {name: value.clone() for name, value in values.items()}
    with torch.no_grad():
        value, gradient, metrics = loss.evaluate(values["logprobs"], values)
    torch.testing.assert_close(value, expected.detach().double())
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics == pytest.approx({name: torch.as_tensor(metric).item() for name, metric in expected_metrics.items()})
    assert value.shape == () and value.dtype == torch.float64 and not gradient.requires_grad
    assert all(torch.equal(values[name], before[name]) for name in values)


def test_metrics_combine_as_on_the_client():
    each = [{"custom/a:sum": 1.0, "custom/b:mean": 2.0}, {"custom/a:sum": 3.0, "custom/b:mean": 5.0}]
    assert combine_metrics(each) == {"custom/a:sum": 4.0, "custom/b:mean": 3.5}


def test_evaluation_under_inference_mode():
    loss = register(reinforce, logprobs=1, advantages=1, mask=1)
    with torch.inference_mode():
        values = make_values({"logprobs": 1, "advantages": 1, "mask": 1})
        _, gradient, _ = loss.evaluate(values["logprobs"], values)
    torch.testing.assert_close(gradient, -values["advantages"] * values["mask"])


def test_a_checked_operation_runs():
    loss = register(preference, logprobs=1, reference=1, mask=1, beta=0)
    inputs = {
        "target_tokens": np.array([1, 2]),
        "reference": np.array([-2.0, -3.0]),
        "mask": np.array([1, 0]),
        "beta": np.array([0.5]),
    }
    datum = Datum(tokens=np.array([0, 1]), loss_fn_inputs=inputs)
    config: dict[str, float | str] = {"loss_id": "l"}
    operation = ForwardBackward(request_id="r", model_id="m", data=[datum], loss_fn="custom", loss_fn_config=config)
    checked = check_operation(operation, vocab_size=9, max_context=9, custom_losses={"l": loss})
    tensors = {name: torch.from_numpy(array) for name, array in checked.data[0].inputs.items()}
    value, gradient, metrics = loss.evaluate(torch.tensor([-1.0, -1.0]), tensors)
    margin = 0.5 * (1.0 - 2.0)
    assert value.item() == pytest.approx(math.log1p(math.exp(-margin)))
    assert gradient.tolist() == pytest.approx([-0.5 / (1 + math.exp(margin)), 0.5 / (1 + math.exp(margin))])
    assert metrics == {"custom/margin:mean": margin, "custom/accuracy:mean": 0.0}


# ── losses that do not work out ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda logprobs: (logprobs * 2, {}), "returned torch.float32 of shape (13,); a floating-point scalar"),
        (lambda logprobs: ((logprobs > 0).sum(), {}), "returned torch.int64 of shape ()"),
        (lambda logprobs: (logprobs.shape[0], {}), "returned int; a floating-point scalar tensor"),
        (lambda logprobs: (logprobs.sum().detach(), {}), "does not depend on logprobs in a way that has a gradient"),
        (lambda logprobs: (logprobs.sum() / 0, {}), "returned -inf; a finite scalar"),
        (
            lambda logprobs: ((logprobs.sum() * 0).sqrt(), {}),
            "gradient of the custom loss is not finite at logprobs[0]",
        ),
        (
            lambda logprobs: (logprobs.sum(), {"custom/a:sum": logprobs}),
            "metric 'custom/a:sum' of the custom loss is not",
        ),
        (lambda logprobs: (logprobs[99], {}), "node 'getitem' (operator.getitem): index 99 is out of bounds"),
        (lambda logprobs: (logprobs.gather(0, logprobs.long() - 99).sum(), {}), "node 'gather' (gather): index"),
        (lambda logprobs: (logprobs + logprobs[:2], {}), "node 'add' (operator.add): The size of tensor a (13)"),
        (
            lambda logprobs: (logprobs.sum() / (1 / (logprobs.shape[0] - 13)), {}),
            "(operator.truediv): division by zero",
        ),
        (
            lambda logprobs: (logprobs.sum() * math.exp(logprobs.sum()), {}),
            "(math.exp): numbers are accepted; for tensors",
        ),
    ],
)
def test_losses_without_a_value_name_the_reason(function, message):
    loss = register(function, logprobs=1)
    with pytest.raises(InvalidInput) as caught:
        loss.evaluate(-torch.rand(13), {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "function, refused",
    [
        (lambda logprobs: (torch.rand_like(logprobs).sum(), {}), "'torch.rand_like'"),
        (lambda logprobs: (torch.empty_like(logprobs).sum() + logprobs.sum(), {}), "'torch.empty_like'"),
        (lambda logprobs: (F.dropout(logprobs).sum(), {}), "'torch.nn.functional.dropout'"),
        (
            lambda logprobs: (logprobs.exp_().sum(), {}),
            "'exp_', which is not among what a custom loss may call; functions",
        ),
        (lambda logprobs: (torch.relu_(logprobs).sum(), {}), "'torch.relu_'"),
        (
            lambda logprobs: (F.relu(logprobs, inplace=True).sum(), {}),
            "gives torch.nn.functional.relu the argument 'inplace'",
        ),
        (lambda logprobs: (logprobs.data.sum(), {}), "reads attribute 'data'; accepted: T, device, dtype"),
        (lambda logprobs: (logprobs.grad_fn, {}), "reads attribute 'grad_fn'"),
        (lambda logprobs: (torch.autograd.grad(logprobs.sum(), logprobs)[0].sum(), {}), "'torch.autograd.grad'"),
        (lambda logprobs: (torch.ops.aten.exp(logprobs).sum(), {}), "'torch.ops.aten.exp'"),
        (lambda logprobs: (logprobs.register_hook(None), {}), "'register_hook'"),
        (lambda logprobs: (logprobs.data_ptr(), {}), "'data_ptr'"),
    ],
)
def test_what_the_client_can_trace_but_is_not_harmless(function, refused):
    with pytest.raises(Unsupported) as caught:
        register(function, logprobs=1)
    assert refused in str(caught.value)


# ── hostile graphs ────────────────────────────────────────────────────────────────────────────────────

LOGPROBS = {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}
REF = {"ref": "logprobs"}


def node(target, *args, name="x", op="call_function", **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def output(loss="x", metrics=None):
    return node("output", {"tuple": [{"ref": loss}, {"dict": metrics or {}}]}, name="output", op="output")


def parse(*nodes, inputs=(("logprobs", 1),), **graph):
    return CustomLoss.parse(list(inputs), {"format": 1, "nodes": [LOGPROBS, *nodes], **graph})


@pytest.mark.parametrize(
    "target",
    """
        torch.load torch.save torch.hub.load torch.compile torch.from_file torch.frombuffer torch.empty
        torch.as_strided torch.nn.functional.torch.load torch.functional.torch torch.multiprocessing.spawn
        torch.set_num_threads torch.manual_seed torch.__dict__ torch.Tensor.__init__ torch.bincount
        torch.combinations torch.cartesian_prod operator.attrgetter operator.methodcaller operator.itemgetter
        operator.setitem operator.delitem operator.iadd operator.concat operator.__add__ math.factorial math.comb
        math.prod builtins.eval builtins.exec builtins.setattr builtins.print eval __import__ os.system
        subprocess.run
    """.split(),
)
def test_functions_that_are_not_listed(target):
    with pytest.raises(Unsupported, match=r"node 'x' calls '.*', which is not among what a custom loss may call"):
        parse(node(target, REF), output())


@pytest.mark.parametrize(
    "method",
    """
        item numpy tolist backward __reduce__ __class__ __getattribute__ __setitem__ __len__ add_ copy_ set_ resize_
        as_strided new_empty storage untyped_storage apply_ map_ cuda requires_grad_ share_memory_ to_sparse
        retain_grad tensor_split index_put bernoulli
    """.split(),
)
def test_methods_that_are_not_listed(method):
    with pytest.raises(Unsupported, match=f"calls '{method}'"):
        parse(node(method, REF, op="call_method"), output())


@pytest.mark.parametrize("name", ["data", "grad", "grad_fn", "__class__", "__dict__", "_base", "is_leaf", "real"])
@pytest.mark.parametrize("target", ["getattr", "builtins.getattr"])
def test_attributes_that_are_not_listed(target, name):
    with pytest.raises(Unsupported, match=f"reads attribute '{name}'; accepted: T, device, dtype, indices"):
        parse(node(target, REF, name), output())


@pytest.mark.parametrize(
    "call, message",
    [
        (node("torch.exp", {"ref": "y"}), "refers to 'y', which is no earlier node"),
        (node("torch.exp", {"ref": "x"}), "refers to 'x', which is no earlier node"),
        (node("torch.exp", REF, name="logprobs"), "has the name of an earlier node"),
        (node("torch.exp", {"ref": 0}), "has argument 'ref': of 0 bits"),
        (node("torch.exp", {"eval": "1"}), "has argument 'eval': '1'"),
        (node("torch.exp", {"ref": "logprobs", "tuple": []}), "has argument of type NoneType"),
        (node("torch.exp", {"dtype": "complex64"}), "has argument 'dtype': 'complex64'"),
        (node("torch.exp", {"device": "meta"}), "has argument 'device': 'meta'"),
        (node("torch.exp", {"layout": "sparse_coo"}), "has argument 'layout'"),
        (node("torch.exp", {"float": "1e3"}), "has argument 'float': '1e3'"),
        (node("torch.exp", {"slice": [1, 2]}), "has argument 'slice'"),
        (node("torch.norm", REF, p="nuc"), "has argument 'nuc', which is not accepted"),
        (node("torch.add", REF, 10**5000), "has argument of 16610 bits"),
        (node("torch.exp", REF, out=REF), "gives torch.exp the argument 'out', which is not accepted"),
        (node("torch.gather", REF, 0, REF, sparse_grad=True), "gives torch.gather the argument 'sparse_grad'"),
        (node("torch.nn.functional.relu", REF, True), "gives torch.nn.functional.relu 2 arguments by position; 1"),
        (node("torch.nn.functional.normalize", REF, 2, 0, 1e-3, REF), "5 arguments by position; 4"),
        (node("getattr", REF, "shape", 1), "calls getattr; a tensor and the name"),
        (node("getattr", REF, {"ref": "logprobs"}), "calls getattr; a tensor and the name"),
        (node("model", REF, op="call_module"), "is a call_module; call_function and call_method are accepted"),
        (node("weight", op="get_attr"), "is a get_attr; call_function and call_method are accepted"),
        (node("logprobs", op="placeholder"), "is a placeholder; call_function"),
        (node("output", REF, op="output"), "is a output; call_function"),
        ({**node("torch.exp", REF), "code": "1"}, "node '#1' is not an object with args, kwargs, name, op, target"),
        ({"op": "call_function"}, "node '#1' is not an object"),
        ("torch.exp", "node '#1' is not an object"),
        ({**node("torch.exp"), "args": {}}, "has args that are not a list"),
        ({**node("torch.exp"), "target": ["torch.exp"]}, "is not a short string"),
        (node("torch.exp", REF, name="x" * 300), "is not a short string"),
        (node("torch.exp", *[1] * 70_000), "goes beyond 65536 arguments or 8 levels"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_malformed_nodes(call, message):
    with pytest.raises(InvalidInput) as caught:
        parse(call, output())
    assert message in str(caught.value)


def test_deep_nesting():
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    try:
        for argument in (deep, {"tuple": [deep]}, {"ref": deep}, {"dtype": deep}):
            with pytest.raises(InvalidInput):
                parse(node("torch.sum", argument), output())
        with pytest.raises(InvalidInput):
            parse(node("getattr", REF, deep), output())
    finally:
        while isinstance(deep, list):  # taken apart from outside, for the interpreter would recurse
            deep = deep[0]
        gc.collect()


@pytest.mark.parametrize(
    "ending, message",
    [
        (node("torch.exp", {"ref": "x"}, name="y"), "ends the graph as a call_function"),
        (node("output", {"ref": "x"}, op="output", name="o"), "returns something else than (loss, metrics)"),
        (node("output", [{"ref": "x"}], op="output", name="o"), "returns something else than (loss, metrics)"),
        (node("output", [1.0, {"dict": {}}], op="output", name="o"), "returns a loss that does not depend on logprobs"),
        (node("output", [{"ref": "x"}, []], op="output", name="o"), "returns metrics that are not a dict"),
        (output(metrics={"loss:sum": {"ref": "x"}}), "returns metric 'loss:sum'; custom/<name>:sum"),
        (output(metrics={"custom/A:sum": {"ref": "x"}}), "returns metric 'custom/A:sum'"),
        (output(metrics={"custom/a:max": {"ref": "x"}}), "returns metric 'custom/a:max'"),
        (output(metrics={"custom/a:sum\n": {"ref": "x"}}), "returns metric"),
        (output(metrics={"custom/a:sum": 1.0}), "returns metric 'custom/a:sum' that is not a node"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_outputs(ending, message):
    with pytest.raises(InvalidInput) as caught:
        parse(node("torch.sum", REF), ending)
    assert message in str(caught.value)


def test_outputs_given_as_a_list_are_accepted():
    ending = node("output", [{"ref": "x"}, {"dict": {"custom/a:sum": {"ref": "x"}}}], op="output", name="output")
    _, gradient, metrics = parse(node("torch.sum", REF), ending).evaluate(torch.tensor([-1.0, -2.0]), {})
    assert gradient.tolist() == [1, 1] and metrics == {"custom/a:sum": -3.0}


def test_loss_must_reach_logprobs():
    weights = {**LOGPROBS, "name": "weights", "target": "weights"}
    inputs = (("logprobs", 1), ("weights", 1))
    with pytest.raises(InvalidInput, match="does not depend on logprobs"):
        parse(weights, node("torch.sum", {"ref": "weights"}), output(), inputs=inputs)
    parse(weights, node("torch.dot", {"ref": "weights"}, REF), output(), inputs=inputs)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ([], "has 0 inputs; 1 to 16"),
        ([("advantages", 1)], "the first input of a custom loss is ('advantages', 1)"),
        ([("logprobs", 0)], "the first input of a custom loss is ('logprobs', 0)"),
        ([("logprobs", 1)] + [(f"x{i}", 1) for i in range(16)], "has 17 inputs"),
        ([("logprobs", 1), ("logprobs", 1)], "input 1 of the custom loss is named 'logprobs'"),
        ([("logprobs", 1), ("__class__", 3)], "has rank 3; 0, 1 and 2"),
        ([("logprobs", 1), ("Upper", 1)], "is named 'Upper'; unique lowercase names"),
        ([("logprobs", 1), ("weights", 1)], "a placeholder of 'weights', bare, is accepted here"),
    ],
)
def test_inputs(inputs, message):
    with pytest.raises(InvalidInput) as caught:
        parse(node("torch.sum", REF), output(), inputs=inputs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "graph",
    [
        {},
        {"format": 2, "nodes": [LOGPROBS]},
        {"format": 1, "nodes": []},
        {"format": 1, "nodes": {}},
        {"format": 1, "nodes": [LOGPROBS]},
        {"format": 1, "nodes": [LOGPROBS] * 1025},
        {"format": 1, "nodes": [LOGPROBS], "code": ""},
    ],
    ids=["empty", "format", "no-nodes", "object", "no-output", "many", "extra"],
)
def test_graphs(graph):
    with pytest.raises(InvalidInput):
        CustomLoss.parse([("logprobs", 1)], graph)


BOMBS = {
    "zeros": [node("torch.zeros", 2**40)],
    "zeros of an empty dimension": [node("torch.zeros", 0, 2**40)],
    "new_full": [node("new_full", REF, {"tuple": [2**20, 2**20]}, 1.0, op="call_method")],
    "repeat": [node("repeat", REF, 2**40, op="call_method")],
    "repeat_interleave": [node("torch.repeat_interleave", REF, 2**40)],
    "repeat_interleave by values": [
        node("torch.full", [2], 2**40, name="n", dtype={"dtype": "int64"}),
        node("torch.repeat_interleave", {"ref": "n"}),
    ],
    "expand": [node("expand", {"ref": "s"}, 2**20, 2**20, op="call_method")],
    "arange": [node("torch.arange", 0, 1, 1e-12)],
    "linspace": [node("torch.linspace", 0, 1, 2**40)],
    "one_hot": [node("torch._C._nn.one_hot", {"ref": "i"}, 2**40)],
    "one_hot by values": [node("torch._C._nn.one_hot", {"ref": "i"})],
    "pad": [node("torch.nn.functional.pad", REF, {"tuple": [2**40, 0]})],
    "outer": [node("torch.zeros", 2**17, name="z"), node("torch.outer", {"ref": "z"}, {"ref": "z"})],
    "broadcast": [
        node("torch.zeros", 2**16, 1, name="z"),
        node("getattr", {"ref": "z"}, "T", name="t"),
        node("operator.mul", {"ref": "z"}, {"ref": "t"}),
    ],
    "index": [
        node("torch.zeros", 1, 2000, name="z"),
        node("torch.zeros", 2000, name="k", dtype={"dtype": "int64"}),
        node("operator.getitem", {"ref": "z"}, {"ref": "k"}),
    ],
    "einsum": [node("torch.zeros", 2**16, name="z"), node("torch.einsum", "i,j->ij", {"ref": "z"}, {"ref": "z"})],
    "quantile": [node("torch.zeros", 2**16, 1, name="z"), node("torch.quantile", {"ref": "z"}, {"ref": "q"}, 1)],
    "matmul": [node("torch.zeros", 700, 700, name="z"), node("operator.matmul", {"ref": "z"}, {"ref": "z"})],
    "diff": [node("torch.diff", REF, 2**40)],
    "power of integers": [node("operator.pow", 10**9, 10**9)],
    "shift of an integer": [node("operator.lshift", 1, 10**12)],
    "product of integers": [node("operator.mul", 2**62, 2**62)],
    "product of a tuple": [node("getattr", REF, "shape", name="p"), node("operator.mul", {"ref": "p"}, 10**9)],
    "format of a string": [node("operator.mod", "sum", 10**9)],
    "floor of a float": [node("math.floor", 1e300)],
    "complex": [node("operator.pow", -1, 0.5)],
    "doubling": [
        node("torch.cat", [{"ref": f"c{i - 1}" if i else "logprobs"}] * 2, name=f"c{i}") for i in range(40)
    ],
    "splitting": [node("torch.functional.split", REF, 1, name=f"u{i}") for i in range(900)],
}  # fmt: skip


MISUSES = {
    "indices of a condition": [node("torch.where", REF)],
    "a tensor made a number": [node("new_tensor", REF, [{"ref": "s"}], op="call_method")],
    "a method of a tuple": [node("getattr", REF, "shape", name="p"), node("norm", {"ref": "p"}, op="call_method")],
    "a field of a tuple": [node("getattr", REF, "shape", name="p"), node("getattr", {"ref": "p"}, "values")],
    "an attribute of a number": [node("size", REF, 0, op="call_method", name="n"), node("getattr", {"ref": "n"}, "T")],
    "an item of a number": [
        node("size", REF, 0, op="call_method", name="n"),
        node("operator.getitem", {"ref": "n"}, 0),
    ],
    "an index out of range": [node("torch.take", REF, {"ref": "far"})],
    "a row out of range": [node("torch.index_add", REF, 0, {"ref": "far"}, {"ref": "s"})],
    "a cell out of range": [node("torch.scatter", REF, 0, {"ref": "far"}, 1.0)],
}


@pytest.mark.parametrize("nodes", MISUSES.values(), ids=MISUSES)
def test_misuses_are_errors_of_their_node(nodes):
    base = [
        node("torch.sum", REF, name="s", keepdim=True, dim=0),
        node("torch.full", [1], 2**40, name="far", dtype={"dtype": "int64"}),
    ]
    loss = parse(*base, *nodes, node("torch.sum", REF, name="end"), output("end"))
    with pytest.raises(InvalidInput, match=r"custom loss node 'x' \([\w.]+\): "):
        loss.evaluate(torch.zeros(8), {})


@pytest.mark.parametrize("nodes", BOMBS.values(), ids=BOMBS)
def test_bombs_go_off_in_nobodys_memory(nodes):
    base = [
        node("torch.sum", REF, name="s", keepdim=True, dim=0),
        node("long", REF, op="call_method", name="i"),
        node("torch.linspace", 0, 1, 3000, name="q"),
    ]
    loss = parse(*base, *nodes, node("torch.sum", REF, name="end"), output("end"))
    started = time.perf_counter()
    with pytest.raises(InvalidInput, match=r"custom loss node '\w+' \([\w.]+\): "):
        loss.evaluate(torch.zeros(8), {})
    assert time.perf_counter() - started < 5


def test_time_is_bounded_by_the_size_of_the_data():
    steps = [node("torch.zeros", 1000, name="z0")]
    steps += [node("torch.exp", {"ref": f"z{i}"}, name=f"z{i + 1}") for i in range(1000)]
    loss = parse(*steps, node("torch.sum", REF, name="end"), output("end"))
    with pytest.raises(InvalidInput, match="takes more than the 81920 elements it may"):
        loss.evaluate(torch.zeros(1), {})
    loss.evaluate(torch.zeros(1000), {})


# ── every listed call ─────────────────────────────────────────────────────────────────────────────────


def count_elements(result):
    if isinstance(result, torch.Tensor):
        return result.numel()
    return sum(map(count_elements, result)) if isinstance(result, tuple | list) else 0


@pytest.mark.filterwarnings("ignore")
def test_no_listed_call_costs_more_than_foretold_or_changes_its_arguments():
    """Random arguments of all kinds: whatever a call accepts, its result is bounded and its arguments stay the same."""
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    shapes = [(), (5,), (7,), (1,), (0,), (5, 7), (7, 7), (5, 1), (2, 5, 7), (0, 3)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors += [torch.randint(-9, 9, shape, generator=generator) for shape in shapes]
    tensors += [torch.randint(0, 5, shape, generator=generator) for shape in shapes]
    tensors += [torch.rand(shape, generator=generator) > 0.5 for shape in shapes]
    others = [0, 1, 2, -1, 3, 50, 0.5, -2.5, (0,), (1, 0), (2, 3), [1, 2], (-1,), (3, -1, -1), (50,), None, True]
    others += ["sum", torch.float64, ..., slice(None, 2), (None, slice(1, 3)), [tensors[1], tensors[1]], tensors[:3]]
    names = ["dim", "size", "index", "n", "repeats", "dims", "num_classes", "pad", "input", "other", "q", "mask"]

    def draw():
        return rng.choice(tensors if rng.random() < 0.6 else others)

    originals = [tensor.clone() for tensor in tensors]
    calls = {f".{name}": call for name, call in custom_loss_calls.METHODS.items()}
    aliases = ("torch.functional.", "torch._C.")
    calls |= {name: call for name, call in custom_loss_calls.FUNCTIONS.items() if not name.startswith(aliases)}
    succeeded: Counter[str] = Counter()
    for name, call in calls.items():
        for _ in range(60):
            args = [draw() for _ in range(rng.randint(1, call.max_args or 4))]
            args[0] = rng.choice(tensors) if name.startswith(".") else args[0]
            kwargs = {rng.choice(names): draw()} if rng.random() < 0.25 else {}
            try:
                bound = call.cost(args, kwargs) + custom_loss_calls.read(args, kwargs)
                if bound > 10**6:
                    continue
                result = call.function(*args, **kwargs)
            except custom_loss._CALL_ERRORS:
                continue
            succeeded[name] += 1
            # values with their indices are two results
            assert count_elements(result) <= 2 * bound, (name, args, kwargs)
    assert len(succeeded) > 0.7 * len(calls)
    assert all(torch.equal(tensor, original) for tensor, original in zip(tensors, originals, strict=True))
