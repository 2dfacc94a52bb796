"""The conformance tests of futures, with our SDK."""

from tests.conformance.own.loading import same_tests

globals().update(same_tests(__file__))
