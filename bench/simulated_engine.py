"""``python -m bench.simulated_engine DESCRIPTOR``: an engine process that waits instead of computing.

It speaks the protocol of ``engine/messages.py`` and takes as long as the `ServiceTimes` in the environment say. So
the processes around an engine can be measured without one that takes the processor from them. What it saves are small
directories with a manifest; its logprobs and tokens are zeros.
"""

import hashlib
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np

from bench.service_times import ServiceTimes
from bench.simulated_replica import INFO
from lorimer.engine import messages
from lorimer.engine.channel import Connection
from lorimer.engine.translation import decode_operation

TIMES = "BENCH_SERVICE_TIMES"
"""The environment variable with the service times, in JSON."""
WEIGHTS_BYTES = 4096


class SimulatedWorker:
    """The loop of ``engine/worker.py``: commands in order, and samples in as much time as the commands took."""

    def __init__(self, connection: Connection, times: ServiceTimes) -> None:
        self._connection, self._times = connection, times
        self._commands: deque[messages.Command] = deque()
        self._samples: dict[str, tuple[messages.SampleRequest, int]] = {}
        """With the tokens that are left of them."""
        self._is_closing = False
        self._busy_until = 0.0

    def run(self) -> None:
        while True:
            self._receive()
            if self._is_closing:
                return
            if self._commands:
                command = self._commands.popleft()
                seconds = self._seconds(command)
                self._wait(seconds)
                self._execute(command)
                self._decode(seconds)
            elif self._samples:
                self._decode(0.0, num_steps=1)

    def _receive(self) -> None:
        must_wait = not (self._commands or self._samples)
        while must_wait or self._connection.has_message():
            must_wait = False
            data = self._connection.receive()
            if data is None:
                self._is_closing = True
                return
            command = messages.decode_command(data)
            match command:
                case messages.TrainBatch():
                    received = [bytes(self._connection.receive() or b"") for _ in command.payloads]
                    self._commands.append(command.with_payloads(received))
                case messages.SampleRequest():
                    self._samples[command.request_id] = command, command.params.max_tokens or 1
                case messages.Cancel(request_id=request_id):
                    if self._samples.pop(request_id, None) is not None:
                        self._send(messages.Failed(request_id=request_id, category="cancelled", error="cancelled"))
                case messages.GetStatus(request_id=request_id):
                    status = messages.Status(**dict.fromkeys(messages.Status.__struct_fields__, 0))
                    self._send(messages.Done(request_id=request_id, result=status))
                case messages.Shutdown():
                    self._is_closing = True
                    return
                case _:
                    self._commands.append(command)

    def _wait(self, seconds: float) -> None:
        """Wait until the engine would have finished; what the last wait took too long is taken off."""
        now = time.perf_counter()
        self._busy_until = max(self._busy_until, now - 0.001) + seconds
        time.sleep(max(0.0, self._busy_until - now))

    def _seconds(self, command: messages.Command) -> float:
        times = self._times
        match command:
            case messages.TrainBatch(operations=operations):
                num_tokens = sum(len(datum.tokens) for one in operations for datum in _decoded(one).data)
                return times.train(num_tokens, len({one.model_id for one in operations}))
            case messages.OptimStep():
                return times.step
            case messages.CreateRun():
                return times.create
            case messages.SaveState() | messages.PublishSampler():
                return times.save
            case messages.LoadState() | messages.LoadSampler():
                return times.load
        return 0.0

    def _execute(self, command: messages.Command) -> None:
        match command:
            case messages.TrainBatch(operations=operations):
                for one in operations:
                    logprobs = [np.zeros(len(datum.tokens), "f4") for datum in _decoded(one).data]
                    result = messages.TrainResult(logprobs=logprobs, metrics={"loss:sum": 0.0})
                    self._send(messages.Done(request_id=one.request_id, result=result))
                return
            case messages.OptimStep(request_id=request_id):
                self._send(messages.Done(request_id=request_id, result=messages.StepResult(metrics={})))
                return
            case messages.SaveState(directory=directory):
                _save(Path(directory))
        state = messages.StateResult(size_bytes=WEIGHTS_BYTES, seconds=self._times.save)
        self._send(messages.Done(request_id=command.request_id, result=state))  # type: ignore[union-attr]

    def _decode(self, seconds: float, num_steps: int = 0) -> None:
        """Sample for some time, or for a number of steps."""
        while self._samples and (seconds > 0 or num_steps > 0):
            step = self._times.decode_step(len(self._samples))
            self._wait(step)
            seconds, num_steps = seconds - step, num_steps - 1
            for request, left in list(self._samples.values()):
                self._samples[request.request_id] = request, left - 1
                if left <= 1:
                    del self._samples[request.request_id]
                    self._send(messages.Done(request_id=request.request_id, result=_sampled(request)))

    def _send(self, reply: messages.Reply) -> None:
        self._connection.send(messages.encode(reply))


def _decoded(operation: messages.ForwardBackward | messages.EncodedForwardBackward) -> messages.ForwardBackward:
    return decode_operation(operation) if isinstance(operation, messages.EncodedForwardBackward) else operation


def _sampled(request: messages.SampleRequest) -> messages.SampleResult:
    length = request.params.max_tokens or 1
    sequence = messages.SampledSequence(
        tokens=np.zeros(length, "i4"), logprobs=np.zeros(length, "f4"), stop_reason="length"
    )
    return messages.SampleResult(sequences=[sequence] * request.num_samples, prompt_tokens=len(request.prompt))


def _save(directory: Path) -> None:
    directory.mkdir(parents=True)
    weights = bytes(WEIGHTS_BYTES)
    (directory / "weights").write_bytes(weights)
    files = {"weights": {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
    checksum = hashlib.sha256(msgspec.json.encode({"files": files, "checksum": ""})).hexdigest()
    (directory / "lorimer.json").write_bytes(msgspec.json.encode({"files": files, "checksum": checksum}))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    if connection.receive() is None:  # the configuration of the engine
        return
    times = msgspec.json.decode(os.environ[TIMES], type=ServiceTimes)
    connection.send(messages.encode(messages.Ready(info=INFO)))
    SimulatedWorker(connection, times).run()


if __name__ == "__main__":
    main()
