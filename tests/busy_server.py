"""A server that takes so many requests in a second, from all clients together, and answers 503 to the rest.

    python busy_server.py FILE RATE HOW PORTS

It writes the ports to standard output. When its standard input ends it writes what it has counted, as JSON: for each
request (when, port, path, first byte, status), and for each port the most connections at a time that their clients had
open. `most_seen` counts those too that this program had not closed yet. HOW: `second` counts within each second, and
`bucket` has a bucket that fills with time. No answer says when to come again.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import threading
import time
from collections import Counter
from pathlib import Path


class Busy:
    def __init__(self, path: str, rate: float, how: str) -> None:
        self.file = Path(path).open("rb")  # noqa: SIM115 - for the life of the process
        self.size = Path(path).stat().st_size
        self.rate, self.how = rate, how
        self.second, self.taken = 0, 0
        self.bucket, self.filled = rate, time.monotonic()
        self.requests: list[tuple[float, int, str, int, int]] = []
        self.connections: dict[int, set[int]] = {}
        self.most: Counter[int] = Counter()
        self.most_seen: Counter[int] = Counter()

    def takes(self) -> bool:
        now = time.monotonic()
        if self.how == "bucket":
            self.bucket = min(self.rate, self.bucket + (now - self.filled) * self.rate)
            self.filled = now
            self.bucket -= 1 if self.bucket >= 1 else 0
            return self.bucket >= 1
        if int(now) != self.second:
            self.second, self.taken = int(now), 0
        self.taken += 1
        return self.taken <= self.rate

    def came(self, port: int, descriptor: int) -> None:
        there = self.connections.setdefault(port, set())
        there.add(descriptor)
        self.most_seen[port] = max(self.most_seen[port], len(there))
        # The kernel knows of an end that this program will only come to.
        polled = select.poll()
        for each in there:
            polled.register(each, select.POLLRDHUP)
        self.most[port] = max(self.most[port], len(there) - len(polled.poll(0)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        descriptor = writer.get_extra_info("socket").fileno()
        self.came(port, descriptor)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                first, last = (int(part) for part in fields["range"].removeprefix("bytes=").split("-"))
                last = min(last, self.size - 1)
                good = self.takes()
                self.requests.append((time.time(), port, path, first, 206 if good else 503))
                if not good:
                    text = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
                    head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(text)}\r\n\r\n"
                    writer.write(head.encode() + text)
                    await writer.drain()
                    continue
                length = last - first + 1
                answer = (
                    f"HTTP/1.1 206 Partial Content\r\nContent-Length: {length}\r\n"
                    f'Content-Range: bytes {first}-{last}/{self.size}\r\nETag: "one"\r\n\r\n'
                )
                writer.write(answer.encode())
                await writer.drain()
                await asyncio.get_running_loop().sendfile(writer.transport, self.file, first, length)
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            pass
        finally:
            self.connections[port].discard(descriptor)
            writer.close()

    async def run(self, ports: int) -> None:
        servers = [await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1024) for _ in range(ports)]
        print(json.dumps([one.sockets[0].getsockname()[1] for one in servers]), flush=True)
        over = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            sys.stdin.read()
            loop.call_soon_threadsafe(over.set_result, None)

        threading.Thread(target=wait, daemon=True).start()
        await over
        print(json.dumps({"requests": self.requests, "most": self.most, "most_seen": self.most_seen}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(Busy(sys.argv[1], float(sys.argv[2]), sys.argv[3]).run(int(sys.argv[4])))
