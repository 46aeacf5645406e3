"""Executing plans: the lock of the operand's device, and the hold under capture."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from flashinfer.gemm_workspace import (
    _retain_cudnn_graph_if_capturing,
    device_locked,
    stats,
)
from flashinfer.gemm_workspace.state import State

from .fake_device import FakeDevice


def test_the_lock_is_the_operands(device: FakeDevice, state: State) -> None:
    device.current = 2  # a CPU tensor stands for one on the fake's current device

    @device_locked
    def execute(graph: object, a: torch.Tensor, workspace: object = None) -> bool:
        """Doc."""
        return bool(state.device_lock(2)._is_owned())  # type: ignore[attr-defined]

    a = torch.empty(1)
    assert execute(object(), a)
    assert execute(graph=object(), a=a)
    assert execute.__name__ == "execute"
    assert execute.__doc__ == "Doc."
    assert not state.device_lock(2)._is_owned()  # type: ignore[attr-defined]


def test_keeps_another_thread_out(device: FakeDevice) -> None:
    inside, leave = threading.Event(), threading.Event()
    order: list[str] = []

    @device_locked
    def execute(a: torch.Tensor, name: str) -> None:
        order.append(f"{name} in")
        if name == "first":
            inside.set()
            assert leave.wait(30)  # a broken test must not hang the suite
        order.append(f"{name} out")

    first = threading.Thread(target=execute, args=(torch.empty(1), "first"))
    first.start()
    assert inside.wait(30)
    second = threading.Thread(target=execute, args=(torch.empty(1), "second"))
    second.start()
    # The second has either entered by now or waits for the lock; let the first go on.
    second.join(0.05)
    leave.set()
    first.join(30)
    second.join(30)
    assert order == ["first in", "first out", "second in", "second out"]


def test_a_function_without_the_operand_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has arguments \['graph', 'x'\], wanted one called 'a'"):

        @device_locked
        def execute(graph: object, x: object) -> None: ...


def test_a_wrong_call_gets_the_functions_own_error(device: FakeDevice) -> None:
    @device_locked
    def execute(graph: object, a: torch.Tensor) -> None: ...

    with pytest.raises(TypeError, match="missing"):
        execute()  # type: ignore[call-arg]


def test_a_plan_is_held_once_and_only_under_capture(device: FakeDevice, state: State) -> None:
    class Graph:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    one, two = Graph(), Graph()
    _retain_cudnn_graph_if_capturing(one)
    assert stats()["plans_held"] == 0
    with device.capturing():
        for graph in (one, one, two):
            _retain_cudnn_graph_if_capturing(graph)
    assert stats()["plans_held"] == 2
    assert list(map(id, state.holds[7].plans.values())) == [id(one), id(two)]


def test_the_hold_asks_about_the_operands_device(device: FakeDevice) -> None:
    @device_locked
    def execute(graph: object, a: Any) -> None:
        _retain_cudnn_graph_if_capturing(graph)

    class Operand:
        device = torch.device("cuda:1")

    with device.capturing(index=1):
        execute(object(), Operand())
    assert stats()["plans_held"] == 1
    with device.capturing(index=0):
        execute(object(), Operand())
    assert stats()["plans_held"] == 1
