"""The surface of the official SDK compared with ours: names, members, parameters, defaults and kinds.

``official_surface.json`` has every release that is served and not the newest alone: programs written for earlier ones
call what it has dropped. ``tools/official_surface.py`` writes it. The installed release is inspected as well.
"""

import dataclasses
import inspect
import json
from pathlib import Path

import tinker
from tinker.lib import retry_handler
from tinker.lib.public_interfaces import api_future

import lorimer
from lorimer import types

SURFACE = json.loads((Path(__file__).parent / "official_surface.json").read_text("utf-8"))
"""Owner, member, and a list of signature, first and last release; ``""`` is the package."""
INTERNAL = {
    "SidecarError",
    "SidecarDiedError",
    "SidecarIPCError",
    "SidecarStartupError",
    "SamplingClient.feature_gates",
    "SamplingClient.on_queue_state_change",
    "SamplingClient.retry_handler",
    "TrainingClient.on_queue_state_change",
    "TrainingClient.save_weights_and_get_sampling_client_submit",
}
"""The official SDK's own machinery; docs/compatibility.md names each."""

CLASSES = ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture", "LossHandle"]
NOT_OURS = {
    "SamplingClient.on_queue_state_change",  # for the official SDK's own polling
}


def test_programs_of_every_release_find_what_they_call(service, trainer):
    """Compare each member of each release: it is here, of the same kind, and takes every call it took there."""
    clients = {
        "ServiceClient": service,
        "TrainingClient": trainer,
        "SamplingClient": service.create_sampling_client(base_model="lorimer/debug"),
        "RestClient": service.create_rest_client(),
    }
    problems = [
        f"{owner or 'tinker'}.{member} of {first} to {last}: {problem}"
        for owner, members in SURFACE.items()
        for member, spans in members.items()
        if f"{owner}.{member}".removeprefix(".") not in INTERNAL
        for signature, first, last in spans
        if (problem := difference(owner, member, signature, last, clients))
    ]
    assert not problems, "\n".join(problems)


def test_members_that_are_left_out_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text("utf-8")
    assert [name for name in INTERNAL if f"`{name.rpartition('.')[2]}`" not in page and f"`{name}`" not in page] == []
    known = {f"{owner}.{member}".removeprefix(".") for owner, members in SURFACE.items() for member in members}
    assert known >= INTERNAL


def test_record_is_of_the_installed_release():
    assert set(tinker.__all__) == {name for name, spans in SURFACE[""].items() if spans[-1][2] == tinker.__version__}
    for name in CLASSES:
        recorded = {member for member, spans in SURFACE[name].items() if spans[-1][2] == tinker.__version__}
        if "__init__" in recorded:
            recorded.update(parameters_of(SURFACE[name]["__init__"][-1][0]))  # a dataclass's fields
        assert {member for member in dir(getattr(tinker, name)) if not member.startswith("_")} <= recorded, name


def difference(owner: str, member: str, signature: str, last: str, clients: dict) -> str | None:
    """What a program would stumble over; ``None`` if nothing."""
    if owner in ("", "types"):
        module = types if owner else lorimer
        return None if hasattr(module, member) and member in module.__all__ else "not exported"
    home = getattr(types, owner) if owner in SURFACE["types"] else getattr(lorimer, owner)
    if signature in ("attribute", "property", "value"):
        return None if hasattr(clients.get(owner, home), member) or member in fields_of(home) else "not there"
    kind, _, _ = signature.partition("(")
    try:
        ours = home if kind == "fields" else inspect.getattr_static(home, member)
    except AttributeError:
        return f"not there: {signature}"
    if kind in ("static", "class") and not isinstance(ours, {"static": staticmethod, "class": classmethod}[kind]):
        return f"no {kind}method"
    ours = getattr(ours, "__func__", ours)
    if kind == "async" and not is_coroutine(ours):
        return "not a coroutine function"
    mine = inspect.signature(ours).parameters
    if kind not in ("static", "fields"):
        mine = dict(list(mine.items())[1:])
    theirs = parameters_of(signature)
    newest, _, newest_release = SURFACE[owner][member][-1]
    if newest_release == tinker.__version__ != last and call_difference(theirs, parameters_of(newest)):
        return None  # the newest official release does not take the call either
    return call_difference(theirs, mine, compare_defaults=last == tinker.__version__ and kind != "fields")


def parameters_of(signature: str):
    return inspect.signature(eval(f"lambda {signature.partition('(')[2].removesuffix(')')}: 0")).parameters


def fields_of(kind: type) -> set[str]:
    return {*getattr(kind, "model_fields", ()), *getattr(kind, "__dataclass_fields__", ())}


def call_difference(theirs, mine, *, compare_defaults: bool = False) -> str | None:
    """Whether a call that their parameters take is not taken by mine."""
    positions = [name for name, one in mine.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    for index, (name, parameter) in enumerate(theirs.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if parameter.kind not in {one.kind for one in mine.values()}:
                return f"takes no {parameter}"
        elif name not in mine:
            return f"takes no {name!r}"
        elif parameter.kind is not parameter.KEYWORD_ONLY and positions[index : index + 1] != [name]:
            return f"{name!r} is not parameter {index}"
        elif parameter.default is not parameter.empty and mine[name].default is parameter.empty:
            return f"{name!r} is required"
        elif compare_defaults and parameter.default not in (..., mine[name].default):
            return f"{name!r} is {mine[name].default!r}, not {parameter.default!r}"
    extra = [
        name
        for name, one in mine.items()
        if name not in theirs and one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return f"needs {extra}" if extra else None


def members(name: str) -> list[str]:
    official = getattr(tinker, name)
    return [
        f"{name}.{member}"
        for member in vars(official)
        if (not member.startswith("_") or member in ("__init__", "__enter__", "__exit__", "__await__", "__reduce__"))
        and f"{name}.{member}" not in NOT_OURS
    ]


ALL_MEMBERS = [member for name in CLASSES for member in members(name)]


def find(module, member: str):
    owner, _, name = member.partition(".")
    return inspect.getattr_static(getattr(module, owner), name)


def unwrap(value):
    return value.__func__ if isinstance(value, staticmethod) else value


def test_members_are_called_alike():
    assert len(ALL_MEMBERS) > 100
    assert {member: found for member in ALL_MEMBERS if (found := member_differences(member))} == {}


def member_differences(member: str) -> list[str]:
    """Return how a member of ours is called differently from the official one."""
    official, ours = find(tinker, member), find(lorimer, member)
    kinds = [kind.__name__ for kind in (staticmethod, property) if isinstance(official, kind) != isinstance(ours, kind)]
    if kinds or not callable(unwrap(official)) or isinstance(official, property):
        return kinds
    theirs = inspect.signature(unwrap(official)).parameters
    mine = inspect.signature(unwrap(ours)).parameters
    found = [] if [name for name in mine if name in theirs] == list(theirs) else [f"takes {list(mine)}"]
    for name in mine.keys() & theirs.keys():
        pair = [(one[name].kind, one[name].default) for one in (mine, theirs)]
        found += [f"{name} is {pair[0]}, not {pair[1]}"] if pair[0] != pair[1] else []
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    ours_alone = [name for name in mine.keys() - theirs.keys() if mine[name].kind not in by_keyword]
    found += [f"{name} is ours alone and not keyword-only" for name in ours_alone]
    return found + (["coroutine"] if is_coroutine(unwrap(official)) != is_coroutine(unwrap(ours)) else [])


def is_coroutine(function) -> bool:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return inspect.iscoroutinefunction(function)


def test_futures_are_alike():
    theirs = {name for name in vars(api_future.AwaitableConcurrentFuture) if not name.startswith("_")}
    assert theirs <= set(dir(lorimer.AwaitableConcurrentFuture))


def test_retry_config_is_alike():
    theirs = {item.name: item.default for item in dataclasses.fields(retry_handler.RetryConfig)}
    mine = {item.name: item.default for item in dataclasses.fields(lorimer.RetryConfig)}
    assert mine.keys() == theirs.keys()
    for name in mine.keys() - {"retryable_exceptions"}:
        assert mine[name] == theirs[name], name


ERRORS = [name for name in tinker.__all__ if name.endswith("Error")]


def test_exceptions_hang_together_alike():
    for name in ERRORS:
        official, ours = getattr(tinker, name), getattr(lorimer, name)
        theirs = [kind.__name__ for kind in official.__mro__ if kind.__module__.startswith("tinker")]
        mine = [kind.__name__ for kind in ours.__mro__ if kind.__module__ == "lorimer.client.errors"]
        assert mine == theirs, name
        assert issubclass(ours, lorimer.errors.LorimerError), name
        assert getattr(ours, "status_code", None) in (getattr(official, "status_code", None), 0), name
        parameters = [list(inspect.signature(kind.__init__).parameters) for kind in (ours, official)]
        assert parameters[0] == parameters[1], name


def test_auth_is_alike():
    for name in tinker.auth.__all__:
        assert inspect.signature(getattr(lorimer.auth, name)).parameters == {}
