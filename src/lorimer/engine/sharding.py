"""The ranks of an engine: what they tell each other, and how they share the weights of the base model.

Messages between ranks (commands, verdicts, results) go over sockets; tensors go through torch's collectives, gloo on a
CPU and NCCL on CUDA. FSDP2 gathers each layer's weights when a pass needs them. Adapters are whole on every rank; of a
full run each has its rows of every weight, gradient and moment. An engine of one process has the group ``ALONE``, in
which nothing here does anything.

A rank that fails while others wait in a collective cannot be helped: ``GroupFailed`` ends it, and with it the group.
"""

import contextlib
import gc
import hashlib
import math
import os
import socket
import struct
import threading
import traceback
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lorimer.engine.channel import Connection
from lorimer.engine.launch import Seat
from lorimer.engine.messages import Verdict, Verdicts, decode_part, encode


class GroupFailed(BaseException):
    """This rank cannot go on with the others. Not an ``Exception``, so that no handler on the way catches it."""


class Shards:
    """The group of ranks, from the place of one of them."""

    def __init__(self, rank: int = 0, size: int = 1, peers: Sequence[Connection] = (), store: str = "") -> None:
        """``peers``: for rank 0 the other ranks in order, for these only rank 0."""
        self.rank, self.size = rank, size
        self._peers, self._store = peers, store
        self._mesh: DeviceMesh | None = None

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def leader(self) -> Connection:
        """The connection to rank 0, at another rank."""
        assert self.rank, "rank 0 has no leader"
        return self._peers[0]

    def tell(self, frames: Sequence[bytes]) -> None:
        """Send messages from rank 0 to all others."""
        for peer in self._peers if self.rank == 0 else ():
            for frame in frames:
                _send(peer, frame)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the messages of all ranks, in order, at rank 0; nothing elsewhere."""
        if self.rank:
            _send(self.leader, data)
            return []
        return [data, *(_receive(peer) for peer in self._peers)]

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the messages of all ranks, in order, at every rank."""
        parts = self.gather(data)
        self.tell(parts)
        return [_receive(self.leader) for _ in range(self.size)] if self.rank else parts

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over the ranks, the same bits at every rank."""
        if self.is_alone:
            return list(numbers)
        form = f"{len(numbers)}d"
        parts = [struct.unpack(form, part) for part in self.exchange(struct.pack(form, *numbers))]
        return [sum(column) for column in zip(*parts, strict=True)]

    def norm(self, local: float) -> float:
        """Return the norm of tensors that the ranks share, of the norm of each one's part."""
        return local if self.is_alone else math.sqrt(self.sum_numbers(local * local)[0])

    def all(self, flag: bool) -> bool:
        """Return whether the flag is set at every rank."""
        return self.sum_numbers(float(not flag))[0] == 0

    def agree(self, verdicts: list[Verdict | None]) -> list[Verdict | None]:
        """Return the same verdicts at every rank: of each, that of the first rank that has one."""
        if self.is_alone:
            return verdicts
        parts = [decode_part(part) for part in self.exchange(encode(Verdicts(verdicts=verdicts)))]
        by_rank = [part.verdicts for part in parts if isinstance(part, Verdicts)]
        return [next(filter(None, column), None) for column in zip(*by_rank, strict=True)]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Run what each rank does by itself; an error of one is raised at all of them."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.is_alone:
                raise
            failure = error
        (verdict,) = self.agree([None if failure is None else self.report(failure)])
        if verdict is not None:
            raise failure or verdict.exception()

    def report(self, error: Exception, item: int | None = None) -> Verdict:
        """Return what the other ranks hear of an error; its traceback stays in the log of this one."""
        verdict = Verdict.of(error, item)
        if not verdict.is_user and self.rank:
            traceback.print_exception(error)
        return verdict

    def confirm(self, has_failed: bool) -> None:
        """End the group if a command has changed some ranks and failed at others."""
        if not self.is_alone and len(set(self.exchange(bytes([has_failed])))) > 1:
            raise GroupFailed("a command succeeded at some ranks and failed at others")

    def compare(self, what: str, tensors: Sequence[Tensor]) -> None:
        """End the group if these tensors, which must be equal on all ranks, are not."""
        if self.is_alone:
            return
        digest = hashlib.sha256()
        with self.together():
            for tensor in tensors:
                digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().data)
        if len(set(self.exchange(digest.digest()))) > 1:
            raise GroupFailed(f"{what} differs between the {self.size} ranks")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run what all ranks do at the same time. An error would leave the others waiting, so it ends the group."""
        try:
            yield
        except Exception as error:
            if self.is_alone:
                raise
            raise GroupFailed(f"rank {self.rank} failed between collectives") from error

    # ── tensors ───────────────────────────────────────────────────────────────────────────────────────

    def join(self, device: torch.device) -> None:
        """Meet the other ranks; their tensors are on devices of the same type."""
        if self.is_alone:
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            # Only this machine can connect to the sockets of gloo.
            loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{self._store}",
            rank=self.rank,
            world_size=self.size,
        )
        self._mesh = init_device_mesh(device.type, (self.size,))

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace float32 tensors, which all ranks have in the same shapes, by their sums over the ranks."""
        if self.is_alone or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self.together():
            dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def rows(self, num_rows: int, rank: int | None = None) -> slice:
        """Return the rows of a whole tensor that a rank, this one by default, has."""
        each, rank = -(-num_rows // self.size), self.rank if rank is None else rank
        return slice(min(num_rows, rank * each), min(num_rows, (rank + 1) * each))

    def add_sums(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Add to each part this rank's rows of the sum of a whole tensor over the ranks."""
        if not wholes:
            return
        padded = [self._pad(whole, self.size).view(self.size, -1) for whole in wholes]
        flat = torch.cat(padded, 1)
        found = flat.new_empty(flat.shape[1])
        dist.reduce_scatter_tensor(found, flat.view(-1))
        for part, rows in zip(parts, found.split([one.shape[1] for one in padded]), strict=True):
            part += rows[: part.numel()].view_as(part)

    def _pad(self, tensor: Tensor, parts: int) -> Tensor:
        """Return a tensor with rows for so many equal parts, the last of them zeros."""
        missing = -len(tensor) % parts
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor.contiguous()

    def gather_rows(self, part: Tensor, num_rows: int, to: int) -> Tensor | None:
        """Return the whole tensor at rank ``to``, of each rank's rows; ``None`` at the others."""
        each = -(-num_rows // self.size)
        own = torch.cat([part, part.new_zeros(each - len(part), *part.shape[1:])]) if len(part) < each else part
        found = [torch.empty_like(own) for _ in range(self.size)] if self.rank == to else None
        with self.together():
            dist.gather(own.contiguous(), found, dst=to)
        return None if found is None else torch.cat(found)[:num_rows]

    def scatter_rows(self, whole: Tensor | None, part: Tensor, num_rows: int, source: int) -> None:
        """Copy into ``part`` this rank's rows of a tensor that is whole at rank ``source``."""
        each = -(-num_rows // self.size)
        own = part.new_empty(each, *part.shape[1:])
        parts = None if whole is None else list(self._pad(whole, self.size).split(each))
        with self.together():
            dist.scatter(own, parts, src=source)
        part.copy_(own[: len(part)])

    def send_to_first(self, tensor: Tensor, source: int) -> Tensor:
        """Return at rank 0 the tensor of another rank; ``tensor`` has its shape and dtype at both."""
        with self.together():
            if self.rank == source:
                dist.send(tensor.contiguous(), dst=0)
            elif self.rank == 0:
                dist.recv(tensor, src=source)
        return tensor

    def shard(
        self, decoder: nn.Module, layers: Sequence[nn.Module], others: Sequence[nn.Module], dtype: torch.dtype | None
    ) -> None:
        """Leave to each rank its part of the parameters of ``decoder`` and ``others``.

        Each layer, and each of ``others`` (embedding, head), is gathered by itself, in ``dtype`` or its own. Raise if
        anything still holds a whole parameter afterwards: sharding has no effect on one that somebody else refers to.
        """
        modules = [decoder, *others]
        whole = [(name, StorageWeakRef(p.untyped_storage())) for m in modules for name, p in m.named_parameters()]
        wanted = sum(_part_bytes(p, self.size) for p in {id(p): p for m in modules for p in m.parameters()}.values())
        policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
        for unit in [*layers, *others, decoder]:
            fully_shard(unit, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
        for unit in others:
            assert isinstance(unit, FSDPModule)
            unit.set_unshard_in_backward(False)
        for unit in modules:
            assert isinstance(unit, FSDPModule)
            # Gradients of a full run are summed by ``model/gradients.py``, not averaged by FSDP.
            unit.set_requires_gradient_sync(False)
        gc.collect()
        kept = [name for name, storage in whole if not storage.expired()]
        if kept or (held := self.local_bytes(modules)) > wanted:
            raise RuntimeError(f"the base was not sharded: {kept or f'{held} bytes are kept instead of {wanted}'}")

    @staticmethod
    def local_bytes(modules: Sequence[nn.Module]) -> int:
        """Return the bytes of parameters that this rank keeps between passes."""
        found = {id(p): p for module in modules for p in module.parameters()}.values()
        local = [p.to_local() if isinstance(p, DTensor) else p for p in found]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)


ALONE = Shards()


def local_part(parameter: Tensor) -> Tensor:
    """Return what this process has of a parameter; it shares the parameter's memory."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def _part_bytes(parameter: Tensor, size: int) -> int:
    """Return the most bytes of a parameter that one rank keeps: its rows are divided, the first ranks get the rest."""
    rows = len(parameter) if parameter.dim() else 1
    return -(-rows // size) * (parameter.numel() // max(1, rows)) * parameter.element_size()


def take_seat(seat: Seat) -> Shards:
    """Return the group of a process that was started as one of its ranks; the process ends with its starter."""
    threading.Thread(target=_end_with, args=[seat.lifeline], name="lifeline", daemon=True).start()
    peers = [Connection(socket.socket(fileno=descriptor)) for descriptor in seat.peers]
    return Shards(seat.rank, seat.size, peers, seat.store)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)  # a thread in a collective cannot be stopped otherwise


def _send(peer: Connection, data: bytes) -> None:
    try:
        peer.send(data)
    except OSError as error:
        raise GroupFailed(f"another rank is gone: {error}") from error


def _receive(peer: Connection) -> bytes:
    data = peer.receive()
    if data is None:
        raise GroupFailed("another rank is gone")
    return bytes(data)
