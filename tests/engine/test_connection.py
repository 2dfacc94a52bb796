"""Whole messages over real sockets: in pieces, from many threads, and after the other end is gone."""

import fcntl
import resource
import socket
import threading
import time

import pytest

from lorimer.engine.channel import Connection


@pytest.fixture
def pair():
    ends = [Connection(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100_000], ids=lambda size: f"{size}-bytes")
def test_a_message_arrives_whole(pair, size):
    left, right = pair
    message = bytes(i % 251 for i in range(size))
    left.send(message)
    left.send(b"next")
    assert right.receive() == message
    assert right.receive() == b"next"


def test_a_message_larger_than_any_buffer_arrives_whole(pair):
    left, right = pair
    message = bytes(range(256)) * (32 << 12)
    sender = threading.Thread(target=left.send, args=[message])
    sender.start()
    assert right.receive() == message
    sender.join()


def test_what_the_socket_has_no_room_for_is_left_and_can_be_sent_later(pair):
    left, right = pair
    messages = [bytes([number]) * size for number, size in enumerate((0, 1, 60_000, 60_000, 60_000, 60_000, 200_000))]
    rest: list[bytes] = []
    for message in messages:
        rest += Connection.to_parts([message]) if rest else left.try_send([message])
    assert rest
    sender = threading.Thread(target=left.finish_sending, args=[rest])
    sender.start()
    assert [right.receive() for _ in messages] == messages
    sender.join()


def test_bytes_that_trickle_in_make_whole_messages():
    theirs, ours = socket.socketpair()
    connection = Connection(ours)
    received: list[bytearray] = []
    reader = threading.Thread(target=lambda: received.extend(iter(connection.receive, None)))
    reader.start()
    for byte in b"".join(len(m).to_bytes(8, "little") + m for m in (b"abc", b"", b"de")):
        theirs.send(bytes([byte]))
        time.sleep(0.001)
    theirs.close()
    reader.join()
    connection.close()
    assert received == [b"abc", b"", b"de"]


@pytest.mark.parametrize("torn", [b"", b"\5\0\0", (5).to_bytes(8, "little"), (5).to_bytes(8, "little") + b"ab"])
def test_a_torn_message_is_the_end(torn):
    theirs, ours = socket.socketpair()
    connection = Connection(ours)
    theirs.send(torn)
    theirs.close()
    assert connection.has_message()
    assert connection.receive() is None
    assert connection.receive() is None
    connection.close()


def test_closing_wakes_the_reader(pair):
    left, right = pair
    received = []
    reader = threading.Thread(target=lambda: received.append(right.receive()))
    reader.start()
    left.close()
    reader.join(10)
    assert received == [None]
    with pytest.raises(OSError):
        right.send(b"anybody there?")


def test_has_message_does_not_wait_and_does_not_consume(pair):
    left, right = pair
    assert not right.has_message()
    left.send(b"here")
    assert right.has_message()
    assert right.has_message()
    assert right.receive() == b"here"
    assert not right.has_message()


def test_senders_do_not_cut_into_one_another(pair):
    left, right = pair
    num_threads, num_messages = 8, 50

    def send(thread):
        for i in range(num_messages):
            left.send(bytes([thread]) * (1000 * (i % 40) + 1))

    threads = [threading.Thread(target=send, args=[thread]) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    sizes: dict[int, list[int]] = {}
    for _ in range(num_threads * num_messages):
        message = right.receive()
        assert len(set(message)) == 1
        sizes.setdefault(message[0], []).append(len(message))
    for thread in threads:
        thread.join()
    assert sizes == {thread: [1000 * (i % 40) + 1 for i in range(num_messages)] for thread in range(num_threads)}


def test_a_process_with_many_open_files_can_wait_for_messages():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip(f"this system allows {limits[1]} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    theirs, ours = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 1500))
    ours.close()
    left, right = Connection(theirs), Connection(high)
    try:
        assert high.fileno() >= 1500
        assert not right.has_message()
        left.send(b"here")
        assert right.has_message()
        assert right.receive() == bytearray(b"here")
    finally:
        left.close()
        right.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
