"""Settings from files and flags: what is accepted, what is refused, and the schema that says the same."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from lorimer.cookbook.train.config_file import checked, merged, read_pairs, read_settings_file, settings_of
from lorimer.cookbook.train.kinds import KINDS, complete
from lorimer.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inner."""

    size: int = 1
    """How ``large``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    rate: float
    """The rate."""
    steps: int | None = None
    mode: Literal["a", "b"] = "a"
    is_on: bool = False
    names: Sequence[str] = ("x",)
    scales: dict[str, float] | None = None
    inner: Inner | None = None
    path: Path = Path("there")
    function: Callable[[int], int] = abs
    notes: dict[str, Any] | None = None


FOUND = settings_of(Settings)


def test_fields_that_cannot_be_written_are_no_settings():
    assert set(FOUND) == {"rate", "steps", "mode", "is_on", "names", "scales", "inner", "path"}
    assert FOUND["rate"].is_needed and FOUND["rate"].description == "The rate."


def test_values_get_the_types_of_their_fields():
    given = {"rate": "1e-4", "steps": "null", "mode": "b", "is_on": "true", "names": "a, b", "path": "here"}
    assert checked(given, FOUND, "f") == {
        "rate": 1e-4,
        "steps": None,
        "mode": "b",
        "is_on": True,
        "names": ["a", "b"],
        "path": Path("here"),
    }
    tables = read_pairs(["inner.size=3", "scales.low=0.8"])
    assert checked(tables, FOUND, "f") == {"inner": Inner(size=3), "scales": {"low": 0.8}}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rat": 1}, "f: there is no setting 'rat'; the nearest is 'rate'"),
        ({"inner": {"sizes": 1}}, "f: there is no setting 'inner.sizes'; the nearest is 'size'"),
        ({"zzz": 1}, "accepted are rate, steps, mode"),
        ({"rate": "fast"}, "f: rate is 'fast'; a number, 0 or more is accepted"),
        ({"rate": -1.0}, "a number, 0 or more"),
        ({"rate": float("nan")}, "a number, 0 or more"),
        ({"scales": {"low": float("inf")}}, "a table of names and values"),
        ({"steps": 1.5}, "f: steps is 1.5; a whole number, 0 or more or null is accepted"),
        ({"mode": "c"}, "f: mode is 'c'; a or b is accepted"),
        ({"names": 3}, "a list of text"),
        ({"path": 3}, "path is 3; text"),
    ],
)
def test_wrong_values_are_refused_in_one_line(given, told):
    with pytest.raises(InvalidInput) as refused:
        checked(given, FOUND, "f")
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_yaml_and_toml_are_the_same(tmp_path):
    yaml, toml = tmp_path / "run.yaml", tmp_path / "run.toml"
    yaml.write_text("rate: 1e-4\nscales: {low: 0.8}\nnames: [a, b]\n", "utf-8")
    toml.write_text('rate = 1e-4\nnames = ["a", "b"]\n[scales]\nlow = 0.8\n', "utf-8")
    tables = [checked(read_settings_file(path), FOUND, "f") for path in (yaml, toml)]
    assert tables[0] == tables[1] == {"rate": 1e-4, "scales": {"low": 0.8}, "names": ["a", "b"]}
    (tmp_path / "empty.yaml").write_text("# nothing\n", "utf-8")
    assert read_settings_file(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("run.yaml", "rate: 1\nrate: 2\n", "'rate' is given twice"),
        ("run.yaml", "inner: {size: 1, size: 2}\n", "'size' is given twice"),
        ("run.yaml", "rate: [1\n", "is not YAML"),
        ("run.yaml", "rate: !!python/object/apply:os.getcwd []\n", "is not YAML"),
        ("run.yaml", "- 1\n", "a table of names and values is accepted"),
        ("run.toml", "rate = \n", "is not TOML"),
        ("run.json", "{}", "a .yaml, .yml or .toml file is accepted"),
    ],
)
def test_wrong_files_are_refused(tmp_path, name, text, told):
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(InvalidInput, match=r".") as refused:
        read_settings_file(tmp_path / name)
    assert told in str(refused.value)


def test_missing_file_and_wrong_pairs_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_settings_file(tmp_path / "none.yaml")
    for pairs in (["rate"], ["=1"], ["inner=1", "inner.size=2"]):
        with pytest.raises(InvalidInput, match="--set"):
            read_pairs(pairs)


def test_later_values_replace_earlier_ones_within_tables():
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}}) == {"a": {"b": 1, "c": 4}, "d": 3}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Validate as JSON Schema says, for the words that are used here."""
    if "anyOf" in schema:
        return any(accepts(part, value) for part in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {"string": str, "boolean": bool, "integer": int, "number": int | float, "array": list, "object": dict}
    if schema["type"] == "null":
        return value is None
    if not isinstance(value, kinds[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, list):
        return all(accepts(schema["items"], one) for one in value)
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        needed = set(schema.get("required", ())) <= value.keys()
        return needed and all(
            accepts(known[name], one) if name in known else other is not False and accepts(other, one)
            for name, one in value.items()
        )
    return value >= schema.get("minimum", value) if not isinstance(value, str | bool) else True


@pytest.mark.parametrize("name", KINDS)
def test_schema_accepts_what_is_accepted(name):
    """Every default is valid; what the reader refuses, the schema refuses."""
    kind = KINDS[name]
    schema = json.loads(json.dumps(kind.schema(name)))
    needed = {"base_model": "m", "data": "d.jsonl", "task": "questions", "max_tokens": 8}
    given = {one: needed[one] for one in kind.needed}
    defaults = {key: value["default"] for key, value in schema["properties"].items() if "default" in value}
    assert len(defaults) > 10
    assert accepts(schema, given) and accepts(schema, defaults | given)
    assert not accepts(schema, {}) and not accepts(schema, given | {"learning_rat": 1})
    checked(defaults | given, kind.settings, "f")
    for wrong in ({"rank": "x"}, {"rank": -1}, {"save_every": 1.5}, {"base_model": None}):
        assert not accepts(schema, given | wrong)
        with pytest.raises(InvalidInput):
            checked(wrong, kind.settings, "f")


def test_settings_of_the_loops_are_those_of_their_configurations():
    """New fields of a configuration are settings without a word here."""
    for name, field in (("sft", "grad_clip_norm"), ("rl", "kl_penalty_coef"), ("dpo", "beta"), ("distill", "kl_coef")):
        assert field in KINDS[name].settings
    assert "asynchronous" in KINDS["rl"].settings and "stop" not in KINDS["distill"].settings
    assert not {"dataset", "test_data", "evaluators", "notes"} & set(KINDS["sft"].settings)
    assert KINDS["sft"].settings["method"].schema == {"enum": ["lora", "full"]}
    pairs = checked(read_pairs(["optimizer_params.beta1=0.8"]), KINDS["sft"].settings, "f")
    assert pairs == {"optimizer_params": {"beta1": 0.8}}
    assert "resumed" in KINDS["sft"].settings["log_dir"].description


def test_what_is_needed_is_told():
    with pytest.raises(InvalidInput, match="data and base_model are needed"):
        complete("sft", {})
    with pytest.raises(InvalidInput, match="held_out_data and num_held_out"):
        complete("sft", {"data": "d", "base_model": "m", "held_out_data": "e", "num_held_out": 3})
    for tasks, told in (
        (["mt_bench"], "needs a judge"),
        (["gsm9k"], "accepted are gsm8k, svamp, multiple_choice, questions"),
        (["questions"], "questions=FILE is accepted"),
        (["svamp", "svamp"], "twice"),
    ):
        with pytest.raises(InvalidInput, match=told):
            complete("sft", {"data": "d", "base_model": "m", "eval_tasks": tasks})
    with pytest.raises(InvalidInput, match="eval_limit is 0"):
        complete("sft", {"data": "d", "base_model": "m", "eval_limit": 0})
    assert complete("full", {"data": "d", "base_model": "m"})["method"] == "full"
    rl = {"base_model": "m", "max_tokens": 8}
    with pytest.raises(InvalidInput, match="needs data"):
        complete("rl", rl | {"task": "questions"})
    with pytest.raises(InvalidInput, match="makes its own sums"):
        complete("rl", rl | {"task": "arithmetic", "data": "d"})
    with pytest.raises(InvalidInput, match="group_size is 1"):
        complete("rl", rl | {"task": "arithmetic", "group_size": 1})
    assert complete("rl", rl | {"task": "arithmetic"})["log_dir"] == Path("runs/rl")
