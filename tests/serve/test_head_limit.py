"""Connections whose clients send too much of a head, or nothing for too long."""

import asyncio
import contextlib
import logging
import socket
import threading
import time

import pytest
import uvicorn

from jaxbench.serve import head_limit

SILENCE_S = 0.6
HEAD = b"POST /%s HTTP/1.1\r\nHost: x\r\n"
TEN = b"Content-Length: 10\r\n\r\n"


async def answer(scope, receive, send):
    """Count a body; a path of "slow" is answered piece by piece, for longer than a client may be silent."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4 if scope["path"] == "/slow" else 0):
        await send({"type": "http.response.body", "body": b"piece ", "more_body": True})
        await asyncio.sleep(SILENCE_S / 2)
    await send({"type": "http.response.body", "body": b"%d bytes" % size})


@contextlib.contextmanager
def serving(made):
    """Give the port of a server in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(answer, http=made, lifespan="off", log_config=None, timeout_keep_alive=60))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def port():
    """Return the port of a server that waits for a short time."""
    with serving(head_limit.protocol(SILENCE_S)) as port:
        yield port


@contextlib.contextmanager
def connected(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10 * SILENCE_S) as line:
        yield line


def rest(line):
    """What else comes until the server closes, and the seconds until then."""
    began, found = time.monotonic(), b""
    with contextlib.suppress(ConnectionResetError):
        while part := line.recv(65536):
            found += part
    return found, time.monotonic() - began


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", HEAD % b"a", HEAD % b"a" + TEN, HEAD % b"a" + TEN + b"123"],
    ids=["nothing", "a line break", "half a head", "no body", "half a body"],
)
def test_a_client_that_falls_silent_is_closed(port, sent):
    with connected(port) as line:
        line.sendall(sent)
        found, seconds = rest(line)
    assert found == b"" and 0.5 * SILENCE_S < seconds < 5 * SILENCE_S


def test_a_head_that_comes_byte_by_byte_is_closed(port):
    began = time.monotonic()
    with connected(port) as line, contextlib.suppress(OSError):
        for byte in HEAD % b"a" * 10:
            line.sendall(bytes([byte]))
            time.sleep(SILENCE_S / 10)
    assert time.monotonic() - began < 5 * SILENCE_S


def test_line_breaks_behind_an_answer_do_not_keep_a_connection(port):
    with connected(port) as line:
        line.sendall(HEAD % b"a" + b"Content-Length: 0\r\n\r\n")
        assert b"0 bytes" in line.recv(65536)
        line.sendall(b"\r\n")
        found, seconds = rest(line)
    assert found == b"" and seconds < 5 * SILENCE_S


def test_a_body_may_take_long_as_long_as_it_goes_on(port):
    with connected(port) as line:
        line.sendall(HEAD % b"a" + b"Connection: close\r\nContent-Length: 5\r\n\r\n")
        for byte in b"12345":
            time.sleep(SILENCE_S / 2)
            line.sendall(bytes([byte]))
        assert b"5 bytes" in rest(line)[0]


@pytest.mark.parametrize("behind", [b"", HEAD % b"next", HEAD % b"next" + b"Content-Length: 9\r\n\r\n"])
def test_a_long_answer_is_never_cut_whatever_half_request_is_behind_it(port, behind):
    with connected(port) as line:
        line.sendall(HEAD % b"slow" + b"Content-Length: 2\r\n\r\nab")
        found = line.recv(65536)
        line.sendall(behind)
        while b"2 bytes" not in found:
            part = line.recv(65536)
            assert part, found
            found += part
        assert found.count(b"piece ") == 4


def test_the_most_silent_clients_give_way_where_files_run_short():
    made = head_limit.protocol(60.0)
    assert made.most > 20
    made.most = 20
    with serving(made) as port, contextlib.ExitStack() as open_lines:
        answered = open_lines.enter_context(connected(port))
        answered.sendall(HEAD % b"slow" + b"Content-Length: 0\r\n\r\n")
        silent = [open_lines.enter_context(connected(port)) for _ in range(60)]
        with connected(port) as line:
            line.sendall(HEAD % b"a" + b"Connection: close\r\nContent-Length: 0\r\n\r\n")
            assert b"0 bytes" in rest(line)[0]
        assert rest(silent[0])[0] == b""  # the first of them is gone, and the last one is not
        silent[-1].sendall(HEAD % b"a" + b"Connection: close\r\nContent-Length: 0\r\n\r\n")
        assert b"0 bytes" in rest(silent[-1])[0]
        found = b""
        while b"0 bytes" not in found:
            part = answered.recv(65536)
            assert part, found
            found += part


def test_silence_is_told_once_not_for_each_connection(port, caplog):
    closed = head_limit._Closed(30.0)
    with caplog.at_level(logging.WARNING, logger="jaxbench.serve"):
        for number in range(200):
            closed.count(1000.0 + number / 10)
        closed.count(1000.0 + head_limit.TELL_S)
    told = [record.fields["connections"] for record in caplog.records]
    assert told == [1, 200] and "silent" in caplog.records[0].getMessage()


def header(size, more=b""):
    """A head with one long header, of `size` bytes in all."""
    begin, end = HEAD % b"a" + b"Connection: close\r\n" + more + b"X-1: ", b"\r\n\r\n"
    return begin + b"y" * (size - len(begin) - len(end)) + end


@pytest.mark.parametrize("size", [1000, 60_000, head_limit.MAX_HEAD_BYTES])
def test_a_head_of_up_to_64_kib_is_taken_with_a_body_behind_it(port, size):
    with connected(port) as line:
        line.sendall(header(size, b"Content-Length: 200000\r\n") + b" " * 200_000)
        assert b"200000 bytes" in rest(line)[0]


@pytest.mark.parametrize("size", [head_limit.MAX_HEAD_BYTES + 1, 68_000, 100_000, 122_000])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_longer_head_is_refused_however_it_comes(port, size, is_first):
    with connected(port) as line:
        if not is_first:
            line.sendall(HEAD % b"a" + b"Content-Length: 0\r\n\r\n")
            assert b"0 bytes" in line.recv(65536)
        with contextlib.suppress(ConnectionError):
            line.sendall(header(size, b"Content-Length: 0\r\n"))
        found = rest(line)[0]
    assert b" 400 " in found.splitlines()[0] and b"line and headers are over 65536 bytes" in found
