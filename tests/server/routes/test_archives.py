"""Archives made on the way out open as any tar does."""

import io
import tarfile

import pytest

from lorimer.server.routes.archives import archive_parts, parts_bytes


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 3_000_000])
async def test_archive_opens_with_its_files_and_the_marker(tmp_path, size):
    content = bytes(number % 251 for number in range(size))
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    (tmp_path / "adapter_config.json").write_text("{}")
    parts = archive_parts(tmp_path, ["adapter_config.json", "adapter_model.safetensors"])
    (tmp_path / "adapter_model.safetensors").unlink()  # deleting a checkpoint does not end a download
    sent = b"".join([chunk async for chunk in parts_bytes(parts)])
    assert len(sent) == sum(part.size for part in parts)
    with tarfile.open(fileobj=io.BytesIO(sent), mode="r") as opened:
        assert opened.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        assert all(member.isreg() for member in opened.getmembers())
        assert opened.extractfile("adapter_model.safetensors").read() == content
        assert opened.extractfile("checkpoint_complete").read() == b""
    assert all(part.content.closed for part in parts if not isinstance(part.content, bytes))
