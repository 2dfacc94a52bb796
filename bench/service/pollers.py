"""A process that waits for many futures, with one long poll each: ``python -m bench.service.pollers``.

Arguments are host and port; standard input has the ids, one per line. It prints the number of results. It is a separate
process so that its CPU time does not delay the benchmark's own requests.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.service.client import wait
from bench.service.http import HttpPool
from bench.service.server import allow_files


async def hold(host: str, port: int, request_ids: list[str]) -> int:
    pool = HttpPool(host, port)
    results = await asyncio.gather(*(wait(pool, request_id) for request_id in request_ids))
    pool.close()
    return sum(bool(result) for result in results)


@asynccontextmanager
async def pollers(host: str, port: int, request_ids: list[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process that waits for all futures and prints the number of results; it ends with the block."""
    command = [sys.executable, "-m", "bench.service.pollers", host, str(port)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdin is not None
        process.stdin.write("\n".join(request_ids).encode())
        process.stdin.write_eof()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    host, port = sys.argv[1:]
    request_ids = sys.stdin.read().split()
    allow_files(len(request_ids))
    print(asyncio.run(hold(host, int(port), request_ids)))


if __name__ == "__main__":
    main()
