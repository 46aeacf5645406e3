"""How to make a launch again, for other tensors of the same signature.

What a call was seen to launch is described in terms of its arguments: each operand is one of the
arguments, the output, the workspace, a view of an argument, or a constant. An operand that is
none of these (a tensor that the release made on the way) makes the launch one that cannot be
repeated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import frontend, native
from .lanes import lane_workspace
from .native_calls import Shared, Source
from .notes import Launch, Notes, Run
from .signature import PLAIN, TENSORS, Form
from .state import Lane, State

# ``call(values, addresses, stream)``: the arguments, the addresses of the tensors among them and
# the current stream's handle. Does what the op did and returns its output. Raises ReferenceError
# when the plan is gone, and whatever the launch raises.
Call = Callable[[tuple[Any, ...], tuple[int, ...], int], torch.Tensor]

# Library handles are addresses; a tactic that happens to have a handle's value is not.
_LOWEST_HANDLE = 1 << 16


class Unrepeatable(Exception):
    """Why a call cannot be repeated."""


class Prepared(NamedTuple):
    """How to make a launch again, and what a native launch of it is made of, if there is one."""

    call: Call | None
    source: Source | None = None
    plan: int | None = None  # id of cuDNN's plan, if that is what is launched


def prepare(
    state: State, notes: Notes, form: Form, values: tuple[Any, ...], result: Any
) -> Prepared:
    """The way to repeat the call that ``notes`` are of. Raises :class:`Unrepeatable`.

    ``values`` are its arguments, no two of them the same tensor, and ``result`` what it returned.
    A single launch by a library is repeated itself; otherwise the one runner is run again.
    """
    if notes.spoilt is not None:
        raise Unrepeatable(notes.spoilt)
    if len(notes.runs) > 1 or len(notes.launches) > 1:
        raise Unrepeatable("several launches")
    seen = _Seen(state, form, values, result)
    if notes.launches:
        (launch,) = notes.launches
        try:
            if "handle" in launch.kwargs:
                return _plan(seen, launch)
            return _function(seen, launch)
        except Unrepeatable:
            if not notes.runs:
                raise
    if notes.runs:
        return Prepared(_runner(seen, notes.runs[0]))
    raise Unrepeatable("nothing that can be launched again")


class _Seen:
    """Where the operands of a call come from.

    Sources are places in a pool: the arguments, then the output, the workspace, the cuBLAS
    handle, and constants.
    """

    def __init__(self, state: State, form: Form, values: tuple[Any, ...], result: Any) -> None:
        self.state, self.form, self.values = state, form, values
        if type(result) not in TENSORS:
            raise Unrepeatable("a result that is no plain tensor")
        self.result = result
        given = [i for i in form.tensors if values[i] is result]
        self.given = given[0] if given else None
        if self.given is None and not result.is_contiguous():
            raise Unrepeatable("an output that is not contiguous")
        self.out, self.workspace, self.blas = (len(values) + i for i in range(3))
        self.constants: list[Any] = []
        self.views: list[int] = []  # arguments of which the transpose is an operand
        self.lane: Lane | None = None
        self.lane_bytes = 0

    def place(self, operand: Any, host: bool = False) -> int:
        """Place of ``operand`` in the pool; ``host``: a tensor on the CPU is a constant."""
        if not isinstance(operand, torch.Tensor):
            return self._constant(operand)
        if operand is self.result:
            return self.out if self.given is None else self.given
        for i in self.form.tensors:
            if self.values[i] is operand:
                return i
        lane = self.state.ledger.get(operand.data_ptr())
        if lane is not None and operand.dtype is torch.uint8 and operand.dim() == 1:
            if self.lane is not None and (self.lane, self.lane_bytes) != (lane, operand.numel()):
                raise Unrepeatable("two workspaces")
            self.lane, self.lane_bytes = lane, operand.numel()
            return self.workspace
        turned = [i for i in self.form.tensors if _is_transpose(operand, self.values[i])]
        if len(turned) == 1:  # of two arguments at one address it could be either's
            self.views.append(turned[0])
            return -len(self.views)
        if host and operand.device.type == "cpu" and not self._shares_memory(operand):
            self.constants.append(operand)
            return self.blas + len(self.constants)
        raise Unrepeatable("a tensor made on the way")

    def _shares_memory(self, operand: torch.Tensor) -> bool:
        """Whether ``operand`` is memory of an argument or of the output."""
        mine = operand.untyped_storage().data_ptr()
        theirs = [self.values[i] for i in self.form.tensors if self.values[i] is not None]
        return any(each.untyped_storage().data_ptr() == mine for each in (*theirs, self.result))

    def _constant(self, operand: Any) -> int:
        if type(operand) is int and operand >= _LOWEST_HANDLE and operand == _blas():
            return self.blas
        _check_constant(operand)
        self.constants.append(operand)
        return self.blas + len(self.constants)

    def at(self, operand: Any) -> int:
        """As :meth:`place`, for an operand of which only the address counts: it may be another
        view of an argument."""
        out = self.out if self.given is None else self.given
        same = [i for i in self.form.tensors if self.values[i] is operand]
        if same or operand is self.result:
            return same[0] if same else out
        address = operand.data_ptr()
        found = [
            i
            for i in self.form.tensors
            if self.values[i] is not None and self.values[i].data_ptr() == address
        ]
        # An argument may be the output's memory in this call and not in the next.
        if address == self.result.data_ptr() and out not in found:
            found.append(out)
        if len(found) != 1:
            raise Unrepeatable("a tensor made on the way, or two at one address")
        return found[0]

    def addresses(self, places: list[int]) -> Callable[[tuple[int, ...]], Any]:
        """From the addresses of the arguments and the output, those at ``places``."""
        of = [*self.form.tensors, self.out]
        return operator.itemgetter(*(of.index(place) for place in places))

    def output(self) -> Callable[[tuple[Any, ...]], torch.Tensor]:
        """From the arguments, the output: the one given, or a new one like the one made."""
        if self.given is not None:
            return operator.itemgetter(self.given)
        size, strides = tuple(self.result.shape), self.result.stride()
        dtype, device = self.result.dtype, self.result.device
        # With the strides known torch need not find them: 0.3 us less than torch.empty, which the
        # releases call for the same memory.
        return lambda _: torch.empty_strided(size, strides, dtype=dtype, device=device)

    def workspaces(self) -> Callable[[int], torch.Tensor] | None:
        """From the current stream, its workspace: what the op would fetch, or grow to."""
        lane = self.lane
        if lane is None:
            return None
        # The part stands for every name that shares it, and a name of its own for itself.
        part, nbytes = lane.part, self.lane_bytes
        device = self.result.device
        request = (part, nbytes, device)
        hot = self.state.hot

        def workspace(stream: int) -> torch.Tensor:
            known = hot.get(request)
            view = None if known is None else known[1].get(stream)
            return lane_workspace(part, nbytes, device) if view is None else view

        return workspace

    def source(
        self,
        make: Callable[[], tuple[native.Launcher, tuple[int, ...]]],
        shared: Shared | None = None,
        graph: Callable[[], Any] | None = None,
    ) -> Source | None:
        """Of a native launch."""
        index = self.state.device.index_of(self.result.device)
        if self.lane is None or index is None:
            return None
        return Source(
            state=self.state,
            device_index=index,
            make=make,
            given=self.given,
            size=tuple(self.result.shape),
            dtype=self.result.dtype,
            request=(self.lane.part, self.lane_bytes, self.result.device),
            shared=shared,
            graph=graph,
        )

    def argument(self, place: int) -> int:
        """The argument whose address an operand at ``place`` has; -1 for the output made."""
        if place < 0:
            return self.views[-place - 1]
        return -1 if place == self.out else place

    def operands(
        self, places: list[int]
    ) -> Callable[[tuple[Any, ...], torch.Tensor, int], tuple[Any, ...]]:
        """From the arguments, the output and the stream, the operands at ``places``."""
        constants, views, workspace = tuple(self.constants), tuple(self.views), self.workspaces()
        blas = _blas if self.blas in places else _nothing
        pick: Callable[[Any], tuple[Any, ...]] = operator.itemgetter(*places)

        def operands(values: tuple[Any, ...], out: torch.Tensor, stream: int) -> tuple[Any, ...]:
            space = None if workspace is None else workspace(stream)
            if not views:
                return pick((*values, out, space, blas(), *constants))
            turned = [values[i].transpose(-2, -1) for i in reversed(views)]
            return pick((*values, out, space, blas(), *constants, *turned))

        return operands


def _plan(seen: _Seen, launch: Launch) -> Prepared:
    """cuDNN: by address where the frontend lets us, else by its public call; weakly held."""
    if not launch.args or type(launch.args[0]) is not dict or len(launch.args) > 3:
        raise Unrepeatable("a plan called in an unknown way")
    pack, space, *index = launch.args
    kwargs = launch.kwargs
    graph, handle, set_stream = launch.owner, kwargs["handle"], frontend.set_stream()
    reference = frontend.weak(graph)
    number = seen.state.device.index_of(seen.result.device)
    if set_stream is None or reference is None or number is None:
        raise Unrepeatable("a frontend without streams or weak references")
    if seen.place(space) != seen.workspace:
        raise Unrepeatable("a workspace that is not a lane's")
    for key, value in kwargs.items():
        if key != "handle":
            _check_constant(value)
    output, workspace = seen.output(), seen.workspaces()
    assert workspace is not None
    lock, uids = seen.state.device_lock(number), tuple(pack)
    raw = None
    if set(kwargs) == {"handle"} and len(pack) > 1:
        raw = frontend.raw(graph, index[0] if index else None, uids, handle)
    if raw is not None:
        by_address = raw
        whose = [seen.at(operand) for operand in pack.values()]
        pick = seen.addresses(whose)
        made = seen.given is None

        def call(values: tuple[Any, ...], addresses: tuple[int, ...], stream: int) -> torch.Tensor:
            out = output(values)
            space = workspace(stream).data_ptr()
            if made:
                addresses = (*addresses, out.data_ptr())
            with lock:
                set_stream(handle, stream)
                by_address(pick(addresses), space, handle)
            return out

        arguments = {uid: seen.argument(place) for uid, place in zip(uids, whose, strict=True)}
        state, device_index = seen.state, number
        plan_index = index[0] if index else None

        def make() -> tuple[native.Launcher, tuple[int, ...]]:
            graph = reference()
            if graph is None:
                raise native.NativeRefused("the plan was evicted")
            plan = native.cudnn(state, device_index, graph, plan_index, handle)
            return plan.launcher, tuple(arguments[uid] for uid in plan.uids)

        source = seen.source(make, Shared(handle, lock, set_stream), reference)
        return Prepared(call, source, id(graph))
    places = [seen.place(operand) for operand in pack.values()]
    if any(not 0 <= place <= seen.out for place in places):
        raise Unrepeatable("a plan with operands that are no arguments")
    name, rest = launch.name, tuple(index)

    def public(values: tuple[Any, ...], _: tuple[int, ...], stream: int) -> torch.Tensor:
        out = output(values)
        space = workspace(stream)
        graph = reference()
        if graph is None:
            raise ReferenceError("the plan was evicted")
        given = (*values, out)
        pack = {uid: given[place] for uid, place in zip(uids, places, strict=True)}
        with lock:
            set_stream(handle, stream)
            getattr(graph, name)(pack, space, *rest, **kwargs)
        return out

    return Prepared(public, plan=id(launch.owner))


def _function(seen: _Seen, launch: Launch) -> Prepared:
    """A compiled function of the release's, cuBLASLt's above all."""
    if launch.kwargs:
        raise Unrepeatable("a function called in an unknown way")
    places = [seen.place(operand, host=True) for operand in launch.args]
    if len(places) < 2:
        raise Unrepeatable("a function called in an unknown way")
    function = getattr(launch.owner, launch.name)
    output, operands = seen.output(), seen.operands(places)

    def call(values: tuple[Any, ...], _: tuple[int, ...], stream: int) -> torch.Tensor:
        out = output(values)
        function(*operands(values, out, stream))
        return out

    return Prepared(call, _matmul(seen, launch, places))


def _matmul(seen: _Seen, launch: Launch, places: list[int]) -> Source | None:
    """Of a native launch of a release's function of cuBLASLt. Made at once: it takes no memory of
    the device, and later the tensors are gone that say what it is."""
    if launch.name not in native.CUBLASLT:
        return None
    try:
        matmul = native.cublaslt(launch.name, launch.args)
    except native.NativeRefused:
        return None
    made = matmul.launcher, tuple(seen.argument(places[i]) for i in matmul.operands)
    return seen.source(lambda: made)


def _runner(seen: _Seen, run: Run) -> Call:
    """Any other runner: its ``forward`` is given the same inputs."""
    if set(run.kwargs) != {"tactic"}:
        raise Unrepeatable("a runner called in an unknown way")
    if len(run.inputs) < 2:
        raise Unrepeatable("a runner called in an unknown way")
    places = [seen.place(operand) for operand in run.inputs]
    forward, tactic = run.runner.forward, run.kwargs["tactic"]
    output, operands = seen.output(), seen.operands(places)

    def call(values: tuple[Any, ...], _: tuple[int, ...], stream: int) -> torch.Tensor:
        out = output(values)
        forward(list(operands(values, out, stream)), tactic=tactic)
        return out

    return call


def _is_transpose(operand: torch.Tensor, argument: Any) -> bool:
    """Whether ``operand`` is ``argument`` with its last two dimensions exchanged."""
    if argument is None or argument.dim() < 2 or operand.dtype != argument.dtype:
        return False
    if operand.data_ptr() != argument.data_ptr():
        return False
    turned = argument.transpose(-2, -1)
    return bool(operand.shape == turned.shape and operand.stride() == turned.stride())


def _blas() -> int:
    """Handle of cuBLAS for this thread and the current device."""
    return int(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]


def _nothing() -> None:
    return None


def _check_constant(value: Any) -> None:
    """Numbers, names and dtypes, and lists of them: nothing that differs from call to call."""
    if isinstance(value, (tuple, list)):
        for each in value:
            _check_constant(each)
    elif type(value) not in PLAIN:
        raise Unrepeatable(f"an operand that is a {type(value).__name__}")
