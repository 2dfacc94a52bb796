"""What is exported appears whole or not at all, and PEFT opens it."""

import json

import pytest
from peft import PeftConfig

from lorimer.errors import CheckpointError, InvalidInput
from lorimer.models.export.export import base_model_of, export_peft, placed
from tests.engine.adapters_on_disk import make_adapter, make_base, peft_logits

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any targeted module"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
]


@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "qwen3_moe"])
def test_peft_opens_the_export(tmp_path, architecture):
    base = make_base(tmp_path / "base", architecture)
    adapter = make_adapter(base, tmp_path / "adapter")
    found = export_peft(adapter, tmp_path / "exported", "owner/name")
    assert sorted(path.name for path in found.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert PeftConfig.from_pretrained(found.path).base_model_name_or_path == "owner/name"
    assert (peft_logits(base, found.path) - peft_logits(base, adapter)).abs().max() == 0
    assert found.size_bytes == sum(path.stat().st_size for path in found.path.iterdir())
    assert base_model_of(found.path) == "owner/name"


def test_what_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no directory"):
        export_peft(tmp_path / "none", tmp_path / "out", "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        base_model_of(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="does not name its base model"):
        base_model_of(tmp_path / "empty")
    assert not (tmp_path / "out").exists()


def test_placing_is_all_or_nothing(tmp_path):
    with pytest.raises(RuntimeError), placed(tmp_path / "deep" / "out") as directory:
        directory.mkdir()
        (directory / "half").write_text("x")
        raise RuntimeError
    assert list((tmp_path / "deep").iterdir()) == []
    with pytest.raises(ZeroDivisionError), placed(tmp_path / "file") as file:
        file.write_text("x")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    with placed(tmp_path / "file") as file:
        file.write_text("whole")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_text() == "whole"
    with pytest.raises(InvalidInput, match="is there already"), placed(tmp_path / "file"):
        raise AssertionError
    (tmp_path / "empty").mkdir()
    with placed(tmp_path / "empty") as directory:
        directory.mkdir()
        (directory / "x").touch()
    assert (tmp_path / "empty" / "x").exists()
