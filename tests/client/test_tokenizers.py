"""Tokenizers without the model's directory: their files come from the server, once."""

from lorimer.client import tokenizers


def test_files_come_from_the_server_once(service, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sampler = service.create_sampling_client(base_model="lorimer/debug")
    tokenizer = sampler.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("lorimer")) == "lorimer"
    kept = list((tmp_path / "lorimer" / "tokenizers").iterdir())
    assert len(kept) == 1 and (kept[0] / "tokenizer.json").is_file()
    assert not list(kept[0].glob("*.safetensors"))
    modified = (kept[0] / "tokenizer.json").stat().st_mtime_ns
    tokenizers._load.cache_clear()
    again = tokenizers.load_tokenizer(service._connection, "lorimer/debug", "/a/directory/of/another/machine")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert (kept[0] / "tokenizer.json").stat().st_mtime_ns == modified


def test_hub_ids_of_variants():
    assert tokenizers._hub_id("org/model/variant:tag") == "org/model"
