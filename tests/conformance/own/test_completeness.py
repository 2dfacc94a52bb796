"""No conformance test is left out of the second run without a word."""

import importlib
from pathlib import Path

import tinker

import lorimer
from tests.conformance.own.differences import DIFFERENCES, OFFICIAL_ONLY
from tests.conformance.own.loading import load

HERE = Path(__file__).parent
OWN = {path.stem for path in HERE.glob("test_*.py")} - {Path(__file__).stem}


def test_every_module_is_run_or_named():
    assert OWN | OFFICIAL_ONLY.keys() == {path.stem for path in HERE.parent.glob("test_*.py")}
    assert not OWN & OFFICIAL_ONLY.keys()


def test_every_difference_is_a_test():
    tests = {name for module in OWN for name in vars(load(module)) if name.startswith("test_")}
    assert DIFFERENCES.keys() <= tests


def test_loaded_modules_use_our_sdk_and_others_do_not():
    module = load("test_training")
    assert module.tinker is lorimer
    assert module.types is lorimer.types
    assert module.batch()[0].__class__ is lorimer.Datum
    assert importlib.import_module("tests.conformance.samples").tinker is tinker
    from tests.conformance import samples

    assert samples.tinker is tinker
