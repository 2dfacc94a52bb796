"""The surface of the official SDK, compared with ours by inspection: names, parameters, defaults, kinds."""

import dataclasses
import inspect

import pytest
import tinker
from tinker.lib import retry_handler
from tinker.lib.public_interfaces import api_future

import lorimer

CLASSES = ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture", "LossHandle"]
NOT_OURS = {
    "SamplingClient.on_queue_state_change",  # for the official SDK's own polling
}


def test_every_public_name_is_here():
    missing = [name for name in tinker.__all__ if not hasattr(lorimer, name)]
    assert missing == []
    assert set(tinker.__all__) <= set(lorimer.__all__)


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


@pytest.mark.parametrize("member", ALL_MEMBERS)
def test_member_is_called_alike(member):
    official, ours = find(tinker, member), find(lorimer, member)
    assert isinstance(official, staticmethod) == isinstance(ours, staticmethod)
    assert isinstance(official, property) == isinstance(ours, property)
    if not callable(unwrap(official)) or isinstance(official, property):
        return
    theirs = inspect.signature(unwrap(official)).parameters
    mine = inspect.signature(unwrap(ours)).parameters
    shared = [name for name in mine if name in theirs]
    assert shared == list(theirs)
    for name, parameter in theirs.items():
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default), name
    for name in mine.keys() - theirs.keys():
        assert mine[name].kind == inspect.Parameter.KEYWORD_ONLY, f"{name} is ours alone"
    assert is_coroutine(unwrap(official)) == is_coroutine(unwrap(ours))


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


@pytest.mark.parametrize("name", ERRORS)
def test_exceptions_hang_together_alike(name):
    official, ours = getattr(tinker, name), getattr(lorimer, name)
    theirs = [kind.__name__ for kind in official.__mro__ if kind.__module__.startswith("tinker")]
    mine = [kind.__name__ for kind in ours.__mro__ if kind.__module__ == "lorimer.client.errors"]
    assert mine == theirs
    assert issubclass(ours, lorimer.errors.LorimerError)
    assert getattr(ours, "status_code", None) in (getattr(official, "status_code", None), 0)
    assert list(inspect.signature(ours.__init__).parameters) == list(inspect.signature(official.__init__).parameters)


def test_auth_is_alike():
    for name in tinker.auth.__all__:
        assert inspect.signature(getattr(lorimer.auth, name)).parameters == {}
