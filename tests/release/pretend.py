"""Stand-ins that let a release's own GEMM code run on a machine without CUDA or cuDNN.

* a ``cudnn`` module whose graphs record what they are executed with and ask for any workspace;
* tensors on the CPU that say they are on ``cuda:0``;
* ``torch.cuda`` functions that answer for one pretended GPU.

Nothing here is FlashInfer's; the release under test is imported afterwards.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

CUDA = torch.device("cuda:0")


@dataclass
class World:
    """The pretended machine. Set its fields, then call into the release."""

    capability: tuple[int, int] = (10, 0)
    backend_version: int = 92301
    capturing: bool = False
    stream: int = 7
    #: Bytes that every plan asks for.
    workspace: int = 0
    plans: int = 3
    handles: int = 0
    builds: int = 0
    executions: list[Handed] = field(default_factory=list)
    #: The capture in progress, also the handle of its graph.
    capture: int = 1
    own_pools: bool = False
    dead_graphs: set[int] = field(default_factory=set)
    #: (bytes, under capture) of each block that the runtime had to make.
    allocated: list[tuple[int, bool]] = field(default_factory=list)


class Handed:
    """A workspace at the moment cuDNN got it. Keeps the storage neither alive nor in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()
        self._base = storage.data_ptr()
        self._storage = StorageWeakRef(storage)

    def still_there(self) -> bool:
        """True if the memory that was handed out is allocated, at the same address."""
        if self._storage.expired():
            return False
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return storage is not None and storage.data_ptr() == self._base


class CudaLooking(torch.Tensor):
    """A CPU tensor that says it is on the pretended GPU."""

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True


def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, pretending."""
    return tensor.as_subclass(CudaLooking)


class Plan:
    """A cuDNN graph that builds nothing and records its executions."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_workspace_size(self, *_: object, **__: object) -> int:
        return self._world.workspace

    get_workspace_size_plan_at_index = get_workspace_size

    def get_execution_plan_count(self) -> int:
        return self._world.plans

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[int, int]]:
        return 100 + index, {1: index}

    def build_plans(self, *_: object) -> None:
        self._world.builds += 1

    def execute(self, _: object, workspace: torch.Tensor, **__: object) -> None:
        self._world.executions.append(Handed(workspace))

    def execute_plan_at_index(
        self, pack: object, workspace: torch.Tensor, *_: object, **__: object
    ) -> None:
        self.execute(pack, workspace)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def pretend_cudnn(world: World) -> None:
    """Install the ``cudnn`` module; call before the release is imported."""
    module: Any = mock.MagicMock(name="cudnn")
    module.__version__ = "1.32.0"
    module.__spec__ = None
    module.backend_version.side_effect = lambda: world.backend_version

    def create_handle() -> int:
        world.handles += 1
        return 1000 + world.handles

    module.create_handle.side_effect = create_handle
    module.graph.side_effect = lambda *_: contextlib.nullcontext((Plan(world), None))
    module.pygraph.side_effect = lambda *_, **__: Plan(world)
    sys.modules["cudnn"] = module


def pretend_cuda(world: World) -> None:
    """Make ``torch.cuda`` and the tensor factories answer for the pretended GPU."""
    stream = SimpleNamespace(cuda_stream=world.stream)

    def properties(*_: object) -> SimpleNamespace:
        major, minor = world.capability
        return SimpleNamespace(
            multi_processor_count=132,
            name="pretended",
            total_memory=1 << 37,
            L2_cache_size=50 << 20,
            major=major,
            minor=minor,
        )

    for name, answer in {
        "current_stream": lambda *_: stream,
        "is_current_stream_capturing": lambda: world.capturing,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: world.capability,
        "get_device_properties": properties,
        "get_device_name": lambda *_: "pretended",
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "device": lambda *_: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "current_blas_handle": lambda: 1,
        "MemPool": lambda: None,
        "use_mem_pool": lambda *_, **__: contextlib.nullcontext(),
    }.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_getCurrentRawStream = lambda _: world.stream
    torch.version.cuda = "13.0"
    for name in (
        *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange"),
        *("rand", "randn", "randint"),
    ):
        setattr(torch, name, _factory(getattr(torch, name)))


def _factory(real: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return real(*args, **kwargs)
        return on_cuda(real(*args, **{**kwargs, "device": "cpu"}))

    return make


class CompiledModule:
    """What a compiler would have made of a kernel's sources: every function of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Runners ask how many tactics there are, or for a list of them.
        count = "tactic_num" in name or "algo" in name
        answer = 3 if count else [0, 1, 2] if "tactics" in name else None
        return lambda *_, **__: answer


def pretend_compiler(*modules: ModuleType) -> None:
    """Let no kernel of ``modules`` be compiled: replace what describes one to the compiler."""
    for module in modules:
        for name in [name for name in vars(module) if name.startswith("gen_")]:
            setattr(module, name, lambda *_, **__: SimpleNamespace(build_and_load=CompiledModule))


class PretendTie:
    """Held by a graph that the world says is alive."""

    def __init__(self, world: World, graph: int) -> None:
        self._world, self._graph = world, graph

    def released(self) -> bool:
        return self._graph in self._world.dead_graphs


class PretendDevice:
    """The runtime's view of the pretended GPU (see ``gemm_workspace.device.Device``).

    It cannot map memory behind an address, so lanes are made of blocks, on the CPU.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def index_of(self, device: torch.device) -> int | None:
        return {"cuda": 0, "cpu": -1}.get(device.type)

    def current_index(self) -> int:
        return 0

    def is_capturing(self, index: int) -> bool:
        return index == 0 and self._world.capturing

    def raw_stream(self, _: int) -> int:
        return self._world.stream

    def stream_key(self, _: int, stream: int) -> int:
        return stream

    def lasts(self, _index: int, _stream: int) -> bool:
        return False

    def alone(self, _: int) -> bool:
        return False

    def make_blas_handle(self, _: int) -> None: ...

    def capture(self, _index: int, _stream: int) -> Any:
        from flashinfer.gemm_workspace.device import Capture

        return Capture(self._world.capture, self._world.capture)

    def pool_of(self, capture: int) -> int | None:
        return capture if self._world.own_pools else 1

    def captures_running(self) -> int:
        return int(self._world.capturing)

    def tie(self, graph: int) -> PretendTie:
        return PretendTie(self._world, graph)

    def new_range(self, _index: int, _nbytes: int) -> None:
        return None

    def allocate(self, _: int, nbytes: int, capturing: bool) -> torch.Tensor:
        self._world.allocated.append((nbytes, capturing))
        return on_cuda(torch.zeros(nbytes, dtype=torch.uint8))

    def allocate_torch(self, index: int, nbytes: int) -> torch.Tensor:
        return self.allocate(index, nbytes, self._world.capturing)

    def release_idle(self, _: int) -> int:
        return 0

    def free_bytes(self, _: int) -> int:
        return 1 << 33

    def idle_bytes(self, _: int) -> int:
        return 0

    def total_bytes(self, _: int) -> int:
        return 1 << 34

    def synchronize(self, _: int) -> None: ...

    def relaxed(self) -> Any:
        return contextlib.nullcontext()

    def device_guard(self, _: int) -> Any:
        return contextlib.nullcontext()

    def capability(self, _: int) -> tuple[int, int]:
        return self._world.capability


def runtime() -> ModuleType | None:
    """The fork's runtime, if the release under test has it."""
    try:
        import flashinfer.gemm_workspace as found
    except ImportError:
        return None
    return found
