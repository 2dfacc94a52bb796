"""The conformance tests of images, with our SDK."""

from tests.conformance.own.loading import same_tests

globals().update(same_tests(__file__))
