"""Large bytes are read whole and exactly, whatever their size and place."""

import os

import pytest

from lorimer.server.decoder import memory_file
from lorimer.server.huge_pages import MIN_BYTES, read_bytes

SIZES = [0, 1, MIN_BYTES - 1, MIN_BYTES, MIN_BYTES + 1, 3 * MIN_BYTES + 4097]


@pytest.fixture
def file():
    descriptor = memory_file()
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 5])
def test_the_bytes_are_those_of_the_file(file, size, offset):
    content = os.urandom(size + offset)
    os.pwrite(file, content, 0)
    found = read_bytes(file, size, offset)
    assert type(found) is bytes
    assert found == content[offset:]
    assert hash(found) == hash(content[offset:])


@pytest.mark.parametrize("size", [10, 2 * MIN_BYTES])
def test_a_shorter_file_is_an_error(file, size):
    os.pwrite(file, bytes(size - 1), 0)
    with pytest.raises(EOFError, match=f"{size - 1} of {size}"):
        read_bytes(file, size, 0)
