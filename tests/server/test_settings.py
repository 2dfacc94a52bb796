"""Where settings come from, what is refused, and that their documents are true."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from lorimer.engine.config import EngineConfig
from lorimer.errors import InvalidInput
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.server.setting_sources import as_toml, load_settings, plain
from lorimer.server.settings import SETTINGS, TYPES, Settings
from lorimer.server.settings_page import settings_page

ROOT = Path(__file__).parents[2]


def test_flags_come_before_the_environment_before_the_file_before_the_default(tmp_path):
    file = tmp_path / "lorimer.toml"
    file.write_text('port = 1\nhost = "localhost"\npoll_seconds = 5\nmodels = ["a", "b=c"]\n')
    environment = {"LORIMER_PORT": "2", "LORIMER_HOST": "::1", "LORIMER_CONFIG": str(file), "PATH": "/bin"}
    found = load_settings({"port": 3}, environment)
    assert (found.settings.port, found.settings.host, found.settings.poll_seconds) == (3, "::1", 5.0)
    assert found.settings.models == ("a", "b=c")
    assert found.settings.dtype == "auto"
    assert [found.origins[name] for name in ("port", "host", "poll_seconds", "dtype")] == [
        "flag",
        "environment LORIMER_HOST",
        str(file),
        "default",
    ]
    assert load_settings({}, {}, file).settings.port == 1


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({"nonsense": 1}, {}, "there is no setting 'nonsense'; `lorimer config` prints"),
        ({"prt": 1}, {}, "there is no setting 'prt'; the nearest is 'port'"),
        ({}, {"LORIMER_POLL_SECOND": "1"}, "'LORIMER_POLL_SECOND'; the nearest is 'LORIMER_POLL_SECONDS'"),
        ({}, {"LORIMER_PORT": "many"}, "port is 'many'"),
        ({"port": 70000}, {}, "port is 70000"),
        ({"port": -1}, {}, "port is -1"),
        ({"dtype": "int4"}, {}, "dtype is 'int4'"),
        ({"poll_seconds": "nan"}, {}, "poll_seconds is nan"),
        ({"poll_seconds": "inf"}, {}, "poll_seconds is inf"),
        ({"models": ()}, {}, "models is empty"),
        ({"models": ("a", "x=a", "a=b")}, {}, "'a' twice"),
        ({"models": ("-rf /=a",)}, {}, "letters, digits"),
        ({"models": ("--trust-remote-code",)}, {}, "letters, digits"),
        ({"models": ("a=",)}, {}, "model is empty"),
        ({"models": ("a=b,quantize=int5",)}, {}, "quantize is 'int5'; none, int8, int4, nf4 are accepted"),
        ({"models": ("a,quantise=int8",)}, {}, "letters, digits"),
        ({"models": ("a,quantize=int8,quantize=nf4",)}, {}, "letters, digits"),
        ({"database": "mysql://u:secret@h/d"}, {}, "mysql://u:\\*\\*\\*@h/d"),
        ({"host": ""}, {}, "host is empty"),
        ({"log_format": "xml"}, {}, "log_format is 'xml'"),
    ],
)
def test_what_is_refused_is_named(flags, environment, message):
    with pytest.raises(InvalidInput, match=message):
        load_settings(flags, environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "is not TOML"),
        ("colour = 1", "no setting 'colour'"),
        ('port = "x"', "port is 'x'"),
        ("models = 3", "models is 3"),
    ],
)
def test_bad_file_is_named(tmp_path, text, message):
    file = tmp_path / "lorimer.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=message) as caught:
        load_settings({}, {}, file)
    assert str(file) in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"none.toml.*cannot be read"):
        load_settings({}, {}, tmp_path / "none.toml")


def test_what_is_printed_can_be_read_again(tmp_path):
    sampler = {"kind": "vllm", "max_loras": 3, "python": "/opt/vllm/bin/python", "arguments": ["--swap-space", "1"]}
    tables = {"a": {"replicas": 2, "dtype": "float32"}, "d/e": {"source": "x", "sampler": sampler}}
    first = load_settings(
        {"models": ("a", 'b="c'), "database": "postgresql+psycopg://u:pass-word@h/d", "model": tables},
        {"LORIMER_PORT": "9"},
    )
    text = as_toml(first)
    assert "pass-word" not in text
    assert re.search(r"^port = 9 +# environment LORIMER_PORT$", text, re.MULTILINE)
    assert tomllib.loads(text) == plain(first.settings)
    assert tomllib.loads(as_toml(load_settings())) == {key: v for key, v in plain(Settings()).items() if key != "model"}
    file = tmp_path / "lorimer.toml"
    file.write_text(text)
    again = load_settings({"database": first.settings.database}, {}, file)
    assert again.settings == first.settings
    vllm = again.settings.engine_configs()["d/e"].vllm
    assert vllm is not None
    assert (vllm.max_loras, vllm.arguments) == (3, ["--swap-space", "1"])


def test_a_table_sets_what_differs_for_one_model(tmp_path):
    file = tmp_path / "lorimer.toml"
    file.write_text('dtype = "float32"\n[model."a/b"]\nreplicas = 3\nsource = "/models/b"\ndtype = "bfloat16"\n')
    settings = load_settings({}, {}, file).settings
    assert settings.num_replicas() == {"a/b": 3}
    (config,) = settings.engine_configs().values()
    assert (config.model, config.dtype) == ("/models/b", "bfloat16")
    both = load_settings({"models": ("c", "a/b=/elsewhere")}, {}, file).settings.engine_configs()
    assert {name: (config.model, config.dtype) for name, config in both.items()} == {
        "c": ("c", "float32"),
        "a/b": ("/models/b", "bfloat16"),
    }
    for text, message in (
        ("replicas = 0", "replicas is 0; at least 1"),
        ("replica = 2", "unknown field `replica`"),
        ('sampler = { kind = "sglang" }', "sglang"),
        ("sampler = { replicas = 0 }", "sampler.replicas is 0; at least 1"),
        ("sampler = { max_lora_rank = 33 }", "sampler.max_lora_rank is 33; 8, 16, 32"),
        ('dtype = "int4"', "int4"),
        ('quantize = "int5"', "int5"),
        ('quantize = "nf4"\nranks = 2', "ranks is 2 with quantize 'nf4'"),
        ('quantize = "nf4"\nsampler = { kind = "vllm" }', "sampler is 'vllm' with quantize 'nf4'"),
    ):
        file.write_text(f'[model."a"]\n{text}\n')
        with pytest.raises(InvalidInput, match=message):
            load_settings({}, {}, file)


def test_a_base_is_quantised_by_its_flag_or_its_table(tmp_path):
    file = tmp_path / "lorimer.toml"
    file.write_text('[model."c"]\nquantize = "nf4"\n[model."d"]\nquantize = "none"\n[model."e"]\n')
    models = "a,quantize=int8, b=./some,quantize=int4,c,d,quantize=int8,e,quantize=int8"
    for flags, environment in (({"models": models}, {}), ({}, {"LORIMER_MODELS": models})):
        settings = load_settings(flags, environment, file).settings
        found = {name: (config.model, config.quantize) for name, config in settings.engine_configs().items()}
        assert found == {
            "a": ("a", "int8"),
            "b": ("./some", "int4"),
            "c": ("c", "nf4"),
            "d": ("d", "none"),
            "e": ("e", "int8"),
        }
    assert [settings.serves(name) for name in ("a", "a,quantize=int8", "b", "./some", "c=c,quantize=nf4")] == [True] * 5
    assert [settings.serves(name) for name in ("a,quantize=nf4", "f", "d,quantize=int8")] == [False] * 3


def test_models_by_name_path_and_alias(tmp_path):
    path = tmp_path / "small.gguf"
    settings = Settings(
        models=("lorimer/tiny", str(tmp_path), str(path), "Qwen/Qwen3-8B=lorimer/tiny"), dtype="float32"
    )
    configs = settings.engine_configs()
    assert list(configs) == ["lorimer/tiny", tmp_path.name, "small.gguf", "Qwen/Qwen3-8B"]
    assert configs["Qwen/Qwen3-8B"].model == "lorimer/tiny"
    assert configs[tmp_path.name].model == str(tmp_path)
    assert all(config.dtype == "float32" for config in configs.values())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.test")),
    ],
)
def test_loopback(host, expected):
    assert Settings(host=host).is_loopback == expected


@pytest.mark.parametrize(
    ("models", "choice", "expected"),
    [(1, "auto", True), (2, "auto", False), (2, "eager", True), (1, "lazy", False)],
)
def test_engines_start_immediately_or_on_first_use(models, choice, expected):
    assert Settings(models=("a", "b")[:models], start_engines=choice).starts_eagerly == expected


def test_data_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Settings().data == tmp_path / "lorimer"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert Settings().data == Path.home() / ".local" / "share" / "lorimer"


def test_every_limit_of_the_scheduler_is_a_setting_with_its_default():
    assert Settings().scheduler_limits() == SchedulerLimits()
    assert {item.name for item in fields(SchedulerLimits)} <= set(TYPES)
    assert Settings(gap_seconds=7).scheduler_limits().gap_seconds == 7


def test_every_setting_has_a_meaning_and_somebody_reads_it():
    assert set(SETTINGS) == set(TYPES)
    files = [path for name in ("server", "cli") for path in (ROOT / "src/lorimer" / name).rglob("*.py")]
    source = "\n".join(path.read_text("utf-8") for path in files)
    handed_on = {item.name for item in fields(SchedulerLimits)} | set(EngineConfig.__struct_fields__)
    unread = [name for name in TYPES if name not in handed_on and not re.search(rf"\.{name}\b", source)]
    assert unread == []


def test_page_is_the_settings():
    assert (ROOT / "docs/configuration.md").read_text("utf-8") == settings_page(), (
        "python -m lorimer.server.settings_page > docs/configuration.md"
    )
