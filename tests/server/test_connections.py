"""One connection's deadlines, in virtual time: when a client loses it, and that no other does."""

import asyncio
import re

from cairn.http.connections import ConnectionDeadlines, get_connection
from cairn.http.web_server import create_web_server
from virtual_time import run

HEAD, STALL = 30.0, 60.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Wire(asyncio.Transport):
    """The server's end of a connection. `aborted`: nobody waits for what has not been read."""

    def __init__(self):
        super().__init__()
        self.written, self.closed, self.aborted, self.unread = b"", False, False, 0
        self.writes = []

    def write(self, data):
        self.written += data
        if data:  # nothing is no write
            self.writes.append(data)

    def close(self):
        self.closed = True

    def abort(self):
        self.closed = self.aborted = True

    def is_closing(self):
        return self.closed

    def get_write_buffer_size(self):
        return self.unread

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def statuses(self):
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", self.written)]


MAX_HEAD = 1 << 15


async def connected(app_seconds=0.0, app=None):
    """A connection to an application, by default to one that takes so long to answer."""

    async def slow(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(app_seconds)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    deadlines = ConnectionDeadlines(head=HEAD, stall=STALL)
    server = create_web_server(app or slow, forwarded_allow_ips=(), lifespan="off", deadlines=deadlines)
    server.config.load()
    connection = server.config.http_protocol_class(config=server.config, server_state=server.server_state, app_state={})
    wire = Wire()
    connection.connection_made(wire)
    return connection, wire


def test_a_kept_connection_outlives_the_time_of_its_first_head():
    async def play():
        connection, wire = await connected()
        for number in range(20):
            for part in (GET[:5], GET[5:10], GET[10:]):
                connection.data_received(part)
            await asyncio.sleep(4)
            assert wire.statuses() == [200] * (number + 1) and not wire.closed
        connection.connection_lost(None)

    run(play())


def test_a_head_that_is_not_complete_may_have_as_many_bytes_as_are_allowed():

    async def play():
        for size, status in ((MAX_HEAD, 200), (MAX_HEAD + 1, 431)):
            connection, wire = await connected()
            connection.data_received((GET[:-2] + b"Name: ").ljust(size, b"y"))
            if not wire.closed:
                connection.data_received(b"\r\n\r\n")
            await asyncio.sleep(1)
            assert wire.statuses() == [status] and wire.closed == (status == 431)
            connection.connection_lost(None)

    run(play())


def test_each_head_has_its_own_time_from_its_first_byte():
    async def play():
        connection, wire = await connected()
        await asyncio.sleep(HEAD - 1)
        connection.data_received(GET)
        await asyncio.sleep(4)
        connection.data_received(GET[:10])
        await asyncio.sleep(HEAD - 1)
        assert wire.statuses() == [200] and not wire.closed
        connection.data_received(GET[10:])
        await asyncio.sleep(4)
        assert wire.statuses() == [200, 200] and not wire.closed
        connection.data_received(GET[:10])
        for place in range(10, 14):
            await asyncio.sleep(HEAD / 5)
            connection.data_received(GET[place : place + 1])
        assert not wire.closed
        await asyncio.sleep(HEAD / 5 + 1)
        assert wire.statuses() == [200, 200, 408] and wire.closed
        connection.connection_lost(None)

    run(play())


def test_who_says_nothing_is_told_nothing():
    async def play():
        connection, wire = await connected()
        await asyncio.sleep(HEAD - 1)
        assert not wire.closed
        await asyncio.sleep(2)
        assert wire.closed and wire.written == b""
        connection.connection_lost(None)

    run(play())


def test_bodies_and_answers_have_other_deadlines():
    async def play():
        connection, wire = await connected(app_seconds=2 * HEAD)
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        for _ in range(4):
            await asyncio.sleep(HEAD / 2)
            connection.data_received(b"a")
        await asyncio.sleep(2 * HEAD + 4)
        # the last byte of the body came just before the time of a head would have been over for the second time
        assert wire.statuses() == [200] and not wire.closed
        connection.connection_lost(None)

    run(play())


def test_a_body_takes_nothing_of_the_next_heads_time():
    async def play():
        connection, wire = await connected()
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        await asyncio.sleep(1)
        connection.data_received(b"a")
        await asyncio.sleep(HEAD - 2)
        connection.data_received(b"a")
        await asyncio.sleep(4)
        assert wire.statuses() == [200] and not wire.closed
        connection.connection_lost(None)

    run(play())


def test_written_bytes_are_waited_for_a_while():
    async def play():
        connection, wire = await connected(app_seconds=4 * STALL)
        connection.data_received(GET)
        connection.pause_writing()
        await asyncio.sleep(STALL - 1)
        connection.resume_writing()
        await asyncio.sleep(STALL)
        connection.pause_writing()
        await asyncio.sleep(STALL - 1)
        assert not wire.aborted
        await asyncio.sleep(2)
        assert wire.aborted
        connection.connection_lost(None)

    run(play())


def test_an_idle_connection_whose_answer_is_not_read_goes_as_well():
    async def play():
        connection, wire = await connected()
        connection.data_received(GET)
        await asyncio.sleep(6)
        assert wire.closed and not wire.aborted
        await asyncio.sleep(STALL)
        assert wire.aborted
        connection.connection_lost(None)

    run(play())


def test_a_refused_connection_whose_answer_is_not_read_goes_as_well():
    async def play():
        connection, wire = await connected()
        connection.data_received(b"nonsense\r\n\r\n")
        assert wire.statuses() == [400] and wire.closed and not wire.aborted
        await asyncio.sleep(STALL + 1)
        assert wire.aborted and wire.statuses() == [400]
        connection.connection_lost(None)

    run(play())


def test_what_is_no_http_behind_the_start_of_an_answer_gets_no_second_one():
    async def play():
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
            await asyncio.sleep(1)

        connection, wire = await connected(app=app)
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.5)
        connection.data_received(b"nonsense\r\n")
        assert wire.statuses() == [200] and wire.written.endswith(b"o") and wire.closed
        connection.connection_lost(None)

    run(play())


def test_a_lost_connection_leaves_no_timer():
    async def play():
        silent, _ = await connected()
        silent.connection_lost(None)
        unread, wire = await connected()
        unread.data_received(GET)
        await asyncio.sleep(1)
        unread.pause_writing()
        unread.connection_lost(None)
        timers = asyncio.get_running_loop()._scheduled
        assert wire.statuses() == [200] and all(timer.cancelled() for timer in timers)

    run(play())


def test_pieces_of_a_chunked_response_can_be_written_without_a_task():
    """To a client that is there and keeps up; their bytes are those of `send`. Other responses have no such way."""
    found = []

    async def app(scope, receive, send):
        found.append(get_connection(scope))
        fields = [(b"content-length", b"2")] if scope["path"] == "/short" else []
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        found.append(get_connection(scope))
        await send({"type": "http.response.body", "body": b"ab", "more_body": scope["path"] != "/short"})
        await asyncio.sleep(5)

    async def play():
        connection, wire = await connected(app=app)
        connection.data_received(GET.replace(b"/ ", b"/short ", 1))
        await asyncio.sleep(1)
        assert found == [None, None]
        connection, wire = await connected(app=app)
        connection.data_received(GET)
        await asyncio.sleep(1)
        assert found[2:] == [None, connection]
        sent = wire.written
        for piece in (b"ab", b"c"):
            connection.write(piece)
        assert wire.written == sent, "all that one turn of the event loop writes goes behind it"
        await asyncio.sleep(0)
        assert wire.written == sent + b"2\r\nab\r\n1\r\nc\r\n" and sent.endswith(b"2\r\nab\r\n")
        assert connection.can_write
        connection.write(b"d")
        connection.pause_writing()
        assert not connection.can_write
        connection.resume_writing()
        assert connection.can_write
        lost, _ = await connected(app=app)
        lost.data_received(GET)
        await asyncio.sleep(1)
        assert lost.can_write
        lost.connection_lost(None)
        assert not lost.can_write and lost not in lost.scope.values()
        connection.write(b"e")
        connection.close()
        assert not connection.can_write and wire.written.endswith(b"1\r\nd\r\n1\r\ne\r\n")

    run(play())


def test_a_piece_of_a_response_waits_for_its_head():
    """Also on a connection that has had a response before, and not for what its client has not read of that one."""
    seen = []

    async def app(scope, receive, send):
        connection = scope["cairn.connection"]
        seen.append(connection.can_write)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append(connection.can_write)
        await asyncio.sleep(1)
        seen.append(connection.can_write)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def play():
        connection, wire = await connected(app=app)
        connection.data_received(GET)
        await asyncio.sleep(2)
        connection.data_received(GET)
        await asyncio.sleep(2)
        assert wire.statuses() == [200, 200] and seen == [False, False, True, True, False, True]
        connection.pause_writing()
        connection._hold_head()
        await asyncio.sleep(1)
        assert not connection.can_write, "the head went, and waits with what came before it"

    run(play())


def test_the_head_of_a_response_is_one_write_with_what_follows_at_once():
    """And goes by itself where nothing does, before its connection is closed as well."""

    async def app(scope, receive, send):
        path = scope["path"]
        fields = [(b"content-length", b"0")] if path == "/empty" else []
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        if path == "/late":
            await asyncio.sleep(1)
        if path != "/empty":
            await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def ask(path, fields=b""):
        connection, wire = await connected(app=app)
        connection.data_received(GET.replace(b"/ ", path.encode() + b" ", 1).replace(b"\r\n\r\n", fields + b"\r\n\r\n"))
        await asyncio.sleep(0.5)
        early = list(wire.writes)
        await asyncio.sleep(5)
        connection.connection_lost(None)
        assert wire.statuses() == [200]
        return early, wire

    async def play():
        writes, _ = await ask("/")
        assert len(writes) == 2 and writes[0].endswith(b"\r\n\r\n2\r\nab\r\n") and writes[1] == b"0\r\n\r\n"
        early, wire = await ask("/late")
        assert len(early) == 1 and early[0].endswith(b"\r\n\r\n") and wire.writes[1:] == [b"2\r\nab\r\n", b"0\r\n\r\n"]
        for fields in (b"", b"\r\nConnection: close"):
            writes, _ = await ask("/empty", fields)
            assert len(writes) == 1

    run(play())
