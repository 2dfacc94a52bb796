"""Sampling clients as data, to be carried to other processes: pickled with the key, or as a text without it."""

import base64
import json
import secrets
import threading
import weakref
from dataclasses import asdict, dataclass, replace
from typing import Any

from lorimer.client import embedded
from lorimer.client.connection import LOCAL, Connection
from lorimer.client.errors import TinkerError
from lorimer.client.sessions import Session


@dataclass(frozen=True)
class ServerState:
    """How a server is reached, and the flags it sent."""

    base_url: str
    default_headers_overrides: dict[str, str]
    client_config: dict[str, Any]
    client_dynamic_config: dict[str, Any]
    api_key: str | None = None


@dataclass(frozen=True)
class SamplerState:
    session_id: str
    sampling_session_id: str
    holder: ServerState
    record_stability_info: bool = False


def state_of(session: Session, sampling_session_id: str, record_stability_info: bool) -> SamplerState:
    connection = session.connection
    server = ServerState(
        connection.base_url,
        connection.headers,
        connection.config.model_dump(),
        connection.dynamic.model_dump(),
        connection.transport.credentials.key,
    )
    return SamplerState(session.session_id, sampling_session_id, server, record_stability_info)


def to_text(state: SamplerState) -> str:
    state = replace(state, holder=replace(state.holder, api_key=None))
    return base64.urlsafe_b64encode(json.dumps(asdict(state), separators=(",", ":")).encode()).decode()


def from_text(handle: str, api_key: str | None) -> SamplerState:
    try:
        values = json.loads(base64.urlsafe_b64decode(handle))
        server = ServerState(**(values.pop("holder") | {"api_key": api_key}))
        return SamplerState(**values, holder=server)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{handle[:40]!r}… is no text of get_sampler_handle: {error}") from None


_lock = threading.Lock()
_sessions: "weakref.WeakValueDictionary[str, Session]" = weakref.WeakValueDictionary()


def session_of(state: SamplerState) -> Session:
    """The session of a copied client; copies in one process share its connections."""
    server = state.holder
    if server.base_url == LOCAL and not embedded.is_running():
        raise TinkerError(
            "this sampling client is of a service that runs in another process without a port; "
            "start it with `lorimer serve` and give its address as base_url to use it from several processes"
        )
    key = json.dumps([state.session_id, asdict(server)], sort_keys=True)
    with _lock:
        session = _sessions.get(key)
        if session is None or session.connection.loop is not session.connection.current_loop():
            connection = Connection(server.base_url, server.api_key, server.default_headers_overrides)
            connection.adopt(server.client_config, server.client_dynamic_config)
            session = _sessions[key] = Session(connection, session_id=state.session_id)
        return session


def random_clone_id() -> int:
    """For servers that hand out none; with the stride of numbers it stays below 2**63."""
    return secrets.randbelow(1_000_000_000) + 1
