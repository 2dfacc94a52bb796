"""What each release of the SDK is sent."""

import pytest
import tinker

from lorimer.types import ClientConfigResponse, ClientDynamicConfigResponse
from lorimer.types.compatibility import (
    NEWEST,
    SdkVersion,
    accepts_protobuf,
    client_config,
    dynamic_config,
    knows_external,
)

VERSIONS = {
    "0.36.0": (0, 36, 0),
    "0.7": (0, 7, 0),
    "AsyncTinker/Python 0.22.1": (0, 22, 1),
    "0.18.0rc1": (0, 18, 0),
    "1.2.3.dev4+local": (1, 2, 3),
    "": None,
    "unknown": None,
    "9" * 10_000: None,
}


@pytest.mark.parametrize(("text", "version"), VERSIONS.items(), ids=[text[:30] for text in VERSIONS])
def test_version_is_read(text, version):
    assert SdkVersion.parse(text) == version


REQUESTS = {
    "body": ({"user-agent": "AsyncTinker/Python 0.20.0"}, "0.25.0", (0, 25, 0)),
    "package header": ({"user-agent": "curl/8.1", "x-stainless-package-version": "0.19.0"}, "", (0, 19, 0)),
    "user agent": ({"user-agent": "AsyncTinker/Python 0.20.0"}, "", (0, 20, 0)),
    "another program": ({"user-agent": "curl/8.1.2"}, "", NEWEST),
    "nothing": ({}, "", NEWEST),
    "nonsense": ({"x-stainless-package-version": "main"}, "dev", NEWEST),
}


@pytest.mark.parametrize(("headers", "body", "version"), REQUESTS.values(), ids=REQUESTS)
def test_version_of_a_request(headers, body, version):
    assert SdkVersion.of_request(headers, body) == version
    assert isinstance(SdkVersion.of_request(headers, body), SdkVersion)


def test_newest_is_the_installed_one():
    assert str(NEWEST) == tinker.__version__


FLAGS = {
    "0.18.0": set(),
    "0.22.0": {"use_pyqwest_transport"},
    "0.22.1": {"use_pyqwest_transport"},
    "0.22.2": set(),
    "0.24.0": set(),
    "0.24.1": {"create_model_via_load_weights"},
    "0.25.0": {"create_model_via_load_weights", "proto_compress_fwdbwd"},
    "0.26.1": {"create_model_via_load_weights", "proto_compress_fwdbwd"},
    "0.26.2": {"create_model_via_load_weights", "proto_compress_fwdbwd", "sample_use_retrieve_futures"},
    "0.32.0": {
        "create_model_via_load_weights",
        "proto_compress_fwdbwd",
        "sample_use_retrieve_futures",
        "sample_join_sampling_session",
    },
    "0.36.0": {
        "create_model_via_load_weights",
        "proto_compress_fwdbwd",
        "sample_use_retrieve_futures",
        "sample_join_sampling_session",
        "custom_loss_server_side",
    },
}


@pytest.mark.parametrize(("version", "flags"), FLAGS.items(), ids=FLAGS)
def test_flags_of_a_release(version, flags):
    config = client_config(SdkVersion.parse(version))
    assert config.keys() == flags
    for flag, value in config.items():
        assert value is (flag != "use_pyqwest_transport")
        assert flag in ClientConfigResponse.model_fields


def test_cancelling_is_for_those_who_know_it():
    assert dynamic_config(SdkVersion(0, 25, 0)) == {}
    assert dynamic_config(SdkVersion(0, 26, 0)) == {"sample_cancel_enabled": True}
    assert dynamic_config(NEWEST).keys() <= ClientDynamicConfigResponse.model_fields.keys()


def test_external_checkpoints_are_for_those_who_know_them():
    assert not knows_external(SdkVersion(0, 27, 2))
    assert knows_external(SdkVersion(0, 28, 0))


ACCEPT = {
    "application/json": False,
    "application/x-protobuf": True,
    "application/x-protobuf, application/json": True,
    "Application/X-Protobuf": True,
    "*/*": False,
    "": False,
}


@pytest.mark.parametrize(("accept", "expected"), ACCEPT.items(), ids=ACCEPT)
def test_protobuf_is_for_those_who_ask(accept, expected):
    assert accepts_protobuf(accept) is expected
