"""A device that pretends: values on the CPU in tensors that say `pretend`, under CUDA's rules about mixing devices.

An operation on tensors of both devices raises as on a GPU (a CPU tensor without dimensions may join), `numpy()` raises,
kernels of the CPU are not there, and everything that makes the host wait for a GPU is counted: reading a value, copies
without pinned memory, and results whose size depends on values. `LORIMER_TEST_DEVICE=pretend` runs the tests of the
engine on it (`make test-device`). Kernels, streams and memory of a GPU are not pretended.
"""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

from lorimer.engine.model.device import Device

_WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose result, or its size, is known to the host only when the device has finished."""
_COPIES = {"_to_copy", "copy_"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}

synchronisations: Counter[str] = Counter()
"""What the host has waited for, by operation and line of the engine, while `counting`."""
_is_counting = False


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what the host waits for inside of the block."""
    global _is_counting
    synchronisations.clear()
    _is_counting = True
    try:
        yield synchronisations
    finally:
        _is_counting = False


def _wait(what: str) -> None:
    if _is_counting:
        synchronisations[f"{what} at {_caller()}"] += 1


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/lorimer/" in frame.filename:
            return f"{frame.filename.rpartition('/lorimer/')[2]}:{frame.lineno}"
    return "a test"


class PretendTensor(Tensor):
    """A tensor on the pretended device; `inner` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "PretendTensor":
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE.handle,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor of the pretended device to numpy; use Tensor.cpu() first")

    __array__ = numpy  # type: ignore[assignment]

    @property  # type: ignore[override]
    def data(self) -> "PretendTensor":
        return PretendTensor(self.inner.detach())

    @data.setter
    def data(self, other: "PretendTensor") -> None:
        """Take the values of another tensor, as a full run does that samples from a copy of its weights."""
        Tensor.data.__set__(self, other)  # the dtype, which may be another
        self.inner = other.inner.detach()

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inner.tolist()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == "pretend"


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation on the values, if a GPU would; count it if the host would wait."""
    namespace, _, name = func._schema.name.partition("::")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    there = [tensor for tensor in tensors if not isinstance(tensor, PretendTensor)]
    if namespace == "mkldnn":
        raise NotImplementedError(f"{func} has no kernel on the pretended device")
    if name in _COPIES:
        _check_copy(name, args, kwargs)
        there = []
    elif name in _WAITING:
        _wait(name)
    elif name in _INDEXED:
        indices = [index for index in args[1] if index is not None]
        if isinstance(args[0], PretendTensor):
            if any(index.dtype == torch.bool for index in indices):
                _wait("an index of booleans")
            if not all(isinstance(index, PretendTensor) for index in indices):
                _wait("an index on the CPU")
            there = [tensor for tensor in there if not any(tensor is index for index in indices)]
    if here and any(tensor.dim() for tensor in there):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found pretend:0 and cpu ({func} at {_caller()})"
        )
    is_made_here = _is_pretended(kwargs["device"]) if kwargs.get("device") is not None else bool(here)
    if name == "copy_":
        is_made_here = isinstance(args[0], PretendTensor)
    plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if not is_made_here:
        return result
    # What changes its argument returns it.
    known = {id(tensor.inner): tensor for tensor in here}
    return tree_map(lambda leaf: _pretend(leaf, known), result)


def _check_copy(name: str, args: Any, kwargs: Any) -> None:
    source = args[1] if name == "copy_" else args[0]
    target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
    if _is_pretended(target) == isinstance(source, PretendTensor):
        return
    is_asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
    if not (_is_pretended(target) and is_asynchronous and getattr(source, "is_pretended_pinned", False)):
        _wait("a copy to the device" if _is_pretended(target) else "a copy to the host")


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, PretendTensor):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "pretend" else leaf


def _pretend(leaf: Any, known: dict[int, PretendTensor]) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, PretendTensor):
        return leaf
    return known[id(leaf)] if id(leaf) in known else PretendTensor(leaf)


_setup_privateuseone_for_python_backend("pretend")
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
DEVICE = Device(torch.device("pretend", 0), torch.float32, 1 << 30)
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")

_tensor, _pin_memory, _move = torch.tensor, Tensor.pin_memory, PreTrainedModel.to


def _to(model: Any, *args: Any, **more: Any) -> Any:
    """Move a model. Tied weights stay so on a GPU; here torch makes a parameter of each."""
    moved: Any = _move(model, *args, **more)
    moved.tie_weights()
    return moved


def _make_tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
    """Make a tensor as `torch.tensor` does, which goes past every hook for other devices."""
    if not _is_pretended(device):
        return _tensor(data, device=device, **more)
    _wait("torch.tensor")
    return PretendTensor(_tensor(data, **more))


def _pin(tensor: Tensor) -> Tensor:
    """Return a copy that counts as pinned; a view of it does not."""
    pinned = tensor.clone()
    pinned.is_pretended_pinned = True  # type: ignore[attr-defined]
    return pinned


_device_constructors()  # is cached: `with torch.device(...)` must know the function that ours calls
torch.tensor = _make_tensor
Tensor.pin_memory = _pin  # type: ignore[assignment,method-assign]
PreTrainedModel.to = _to  # type: ignore[assignment,method-assign]
