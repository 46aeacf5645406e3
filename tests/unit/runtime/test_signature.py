"""Signatures: equal keys for the same call, different ones for whatever a release looks at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace import torch_internals
from flashinfer.gemm_workspace.signature import ALIGNMENT, PLAIN, Form, form, refusal

from .fake_release import aligned

NAMES = ("a", "b", "dtype", "out", "flag")
FORM = form(1, NAMES, frozenset({"a", "b", "out", "alpha"}))
DTYPES = (torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    """What tells a tensor; few values, so that two are often alike."""
    return {
        "shape": draw(st.sampled_from([(2, 3), (3, 2), (6,), (1, 2, 3)])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "turned": draw(st.booleans()),
        "parameter": draw(st.booleans()),
        "off": draw(st.sampled_from([0, 0, 16, 32, 48, 128])),
        "device": draw(st.sampled_from(["cpu", "cpu", "meta"])),
    }


def made(what: dict[str, Any] | None) -> torch.Tensor | None:
    if what is None:
        return None
    tensor = aligned(*what["shape"], dtype=what["dtype"], off=what["off"])
    if what["turned"]:
        tensor = tensor.transpose(0, -1)
    tensor = tensor.to(what["device"])
    return torch.nn.Parameter(tensor, requires_grad=False) if what["parameter"] else tensor


def told(what: dict[str, Any] | None) -> object:
    """What the key must tell apart, in the model's own words."""
    if what is None:
        return None
    tensor = made(what)
    assert tensor is not None
    off = what["off"] if what["device"] == "cpu" else 0
    return (
        what["parameter"],
        tuple(tensor.shape),
        tensor.stride(),
        what["dtype"],
        what["device"],
        off & -off,
    )


calls = st.fixed_dictionaries(
    {
        "a": tensors(),
        "b": tensors(),
        "dtype": st.sampled_from(DTYPES),
        "out": st.none() | tensors(),
        "flag": st.sampled_from([True, 1, 1.0, False, 0, None, "1", ""]),
    }
)


def values(call: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(made(call[name]) if name in ("a", "b", "out") else call[name] for name in NAMES)


def model(call: dict[str, Any]) -> tuple[object, ...]:
    flag = call["flag"]
    tensors = (told(call["a"]), told(call["b"]), told(call["out"]))
    return (*tensors, call["dtype"], type(flag), flag)


@given(calls, calls)
def test_keys_are_equal_for_the_same_signature_alone(x: Any, y: Any) -> None:
    assert (FORM.key(*values(x)) == FORM.key(*values(y))) == (model(x) == model(y))
    assert FORM.key(*values(x)) == FORM.key(*values(x))


@pytest.mark.parametrize(
    "other",
    [
        aligned(4, 2).t(),  # strides
        aligned(4, 2),  # shape
        aligned(2, 4, dtype=torch.int32),
        aligned(2, 4, off=16),
        aligned(2, 4).to("meta"),
        torch.nn.Parameter(aligned(2, 4)),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_each_property_alone(place: int, other: torch.Tensor) -> None:
    given: list[Any] = [aligned(2, 4), aligned(2, 4), torch.bfloat16, aligned(2, 4), True]
    key = FORM.key(*given)
    given[place] = aligned(2, 4)
    assert FORM.key(*given) == key
    given[place] = other
    assert FORM.key(*given) != key


@given(calls, calls)
def test_what_a_brief_key_promises(x: Any, y: Any) -> None:
    """Equal brief keys: the same arguments are None, and those that are no tensors are equal."""
    first, second = FORM.brief(*values(x)), FORM.brief(*values(y))
    if model(x) == model(y):
        assert first[0] == second[0]
    if first[0] == second[0]:
        assert (x["out"] is None) == (y["out"] is None)
        assert (x["dtype"], type(x["flag"]), x["flag"]) == (
            y["dtype"],
            type(y["flag"]),
            y["flag"],
        )


@given(calls, calls)
def test_quickly_alike_is_alike(x: Any, y: Any) -> None:
    """Equal brief keys, all aligned, and alike by the one call into C++: equal keys."""
    first, second = values(x), values(y)
    present = [v for v in first if isinstance(v, torch.Tensor)]
    other = [v for v in second if isinstance(v, torch.Tensor)]
    (brief, unaligned, _), (brief_too, unaligned_too, _) = FORM.brief(*first), FORM.brief(*second)
    if brief != brief_too or unaligned or unaligned_too:
        return
    alike = torch_internals.tensors_alike(tuple(present))
    assert alike is not None, "this torch has no TensorGuards, or others"
    if alike(*other):
        assert FORM.key(*first) == FORM.key(*second)
    if FORM.key(*first) == FORM.key(*second):
        assert alike(*other)


@given(calls)
def test_addresses(call: Any) -> None:
    given = values(call)
    _, unaligned, addresses = FORM.brief(*given)
    tensors = [given[i] for i in FORM.tensors]
    assert addresses == tuple(0 if t is None else t.data_ptr() for t in tensors)
    assert bool(unaligned) == any(address % ALIGNMENT for address in addresses)


def test_alike_keeps_no_tensor() -> None:
    import gc
    import weakref

    given = (aligned(2, 3), aligned(3, 2))
    alike = torch_internals.tensors_alike(given)
    assert alike is not None
    watched = [weakref.ref(each) for each in given]
    del given
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_alike_says_no_to_a_tensor_that_comes_twice() -> None:
    """Why the places of such a tensor are told apart by identity."""
    one = aligned(2, 3)
    alike = torch_internals.tensors_alike((one, aligned(2, 3)))
    assert alike is not None
    assert not alike(one, one)
    assert torch_internals.tensors_alike((one, one)) is None


def test_alike_sees_modes() -> None:
    """Dispatch modes and inference act on a tensor's dispatch: it says no, and the key is asked."""
    given = (aligned(2, 3), aligned(3, 2))
    alike = torch_internals.tensors_alike(given)
    assert alike is not None
    assert alike(*given)
    with torch.inference_mode():
        assert not alike(*given)


def test_forms_have_keys_of_their_own() -> None:
    """Two ways to write a call: their values, in another order, must not be mixed up."""
    other = form(2, ("b", "a", "dtype", "out", "flag"), frozenset({"a", "b", "out"}))
    given = (aligned(2, 2), aligned(2, 2), torch.bfloat16, None, True)
    assert FORM.key(*given) != other.key(*given)
    assert FORM.brief(*given)[0] != other.brief(*given)[0]


@pytest.mark.parametrize("wrong", [1, "a", [1], object(), True])
def test_no_tensor_where_one_belongs(wrong: Any) -> None:
    for place in (0, 1, 3):
        given: list[Any] = [aligned(2, 2), aligned(2, 2), torch.bfloat16, None, True]
        given[place] = wrong
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            FORM.key(*given)
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            FORM.brief(*given)


class _Mine(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (0, aligned(2, 2).as_subclass(_Mine), "a tensor of another class"),
        (4, aligned(2, 2), "an argument of an unusual type"),
        (4, (1, 2), "an argument of an unusual type"),
        (4, b"x", "an argument of an unusual type"),
    ],
)
def test_what_a_key_cannot_tell_is_refused(place: int, value: Any, why: str) -> None:
    given: list[Any] = [aligned(2, 2), aligned(2, 2), torch.bfloat16, None, True]
    assert refusal(FORM, tuple(given)) is None
    given[place] = value
    assert refusal(FORM, tuple(given)) == why


def test_plain_values_hold_nothing() -> None:
    assert torch.Tensor not in PLAIN
    assert all(kind not in PLAIN for kind in (list, dict, tuple, object))


def test_a_form_without_tensors() -> None:
    lonely: Form = form(3, ("x", "y"), frozenset())
    assert lonely.key(1, 2) != lonely.key(2, 1)
    assert lonely.brief(1, 2)[1:] == (0, ())
