"""What of the conformance tests does not apply to our SDK, and why."""

OFFICIAL_ONLY = {
    "test_cli": "the commands of the official package",
    "test_compatibility": "the page about the official SDK",
}
"""Modules that are not run a second time."""

_INTERNALS = "looks at internals of the official SDK; tests/client has the same of ours"

DIFFERENCES = {
    "test_every_flag_that_this_release_knows_and_we_serve_is_on": _INTERNALS,
    "test_two_hundred_samples_at_once_go_through_one_poller": _INTERNALS,
    "test_pickled_clients_get_numbers_of_their_own": _INTERNALS,
    "test_heartbeat_of_a_finished_session_is_gone": _INTERNALS,
    "test_telemetry_is_accepted": "our SDK has no telemetry",
    "test_rest_client_of_a_service_client": "create_rest_client is not deprecated in our SDK",
    "test_log_says_why_a_run_waits": "our SDK says it in words of its own; tests/client has them",
}
"""Tests that are not run a second time, by name."""
