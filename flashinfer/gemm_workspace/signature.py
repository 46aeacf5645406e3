"""The signature of a call: everything about its arguments that a release's path looks at.

For each op and each way to write a call of it, one function is generated that reads all of it
without a loop: a loop over five tensors would cost a microsecond more than the reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

# Alignment in bytes that is told apart: pointers aligned to it, or better, are alike. Of the
# runners' checks the strictest asks for 256 (cuBLASLt's bias), the others for 16.
ALIGNMENT = 256

# Exact types: a subclass can run code of its own in everything that is read here.
TENSORS: set[type] = {torch.Tensor, torch.nn.Parameter}

# What may be an argument beside tensors. Compared by value and type: 1, 1.0 and True are three.
PLAIN = (type(None), bool, int, float, str, torch.dtype)


class Form(NamedTuple):
    """One way to write a call of an op: so many positional arguments, then these names.

    Both functions take the arguments in the order in which they are given. They raise
    AttributeError, RuntimeError or TypeError for a value that is no tensor where one belongs.
    """

    # The signature: equal keys, same signature.
    key: Callable[..., Hashable]
    # A key that is cheap, and equal for few signatures; whether some tensor is not aligned to
    # ALIGNMENT (0 or not); and the tensors' addresses, 0 for ``None``, in the order of
    # ``tensors``. Equal brief keys: the same arguments are None, those that are no tensors are
    # equal, and both calls are in inference mode or neither is: its tensors are of another kind,
    # and a warm-up may run in it where the server does not.
    brief: Callable[..., tuple[Hashable, int, tuple[int, ...]]]
    names: tuple[str, ...]  # of the arguments
    tensors: tuple[int, ...]  # places of the tensors among them


def form(number: int, names: tuple[str, ...], tensors: frozenset[str]) -> Form:
    """The form of a call with arguments ``names``; ``number`` tells forms apart in their keys."""
    places = [i for i, name in enumerate(names) if name in tensors]
    plain = [f"type(v{i}), v{i}" for i in range(len(names)) if i not in places]
    whole = [
        f"v{i} if v{i} is None else "
        f"(type(v{i}), v{i}.shape, v{i}.stride(), v{i}.dtype, v{i}.device, "
        f"v{i}.data_ptr() & -v{i}.data_ptr() & {ALIGNMENT - 1})"
        for i in places
    ]
    # The sizes of the first two, the operands, tell nearly all signatures apart.
    sizes = [f"v{i}.numel()" for i in places[:2]] + [f"v{i} is None" for i in places[2:]]
    arguments = ", ".join(f"v{i}" for i in range(len(names)))
    source = f"""
def key({arguments}):
    return {", ".join([str(number), *plain, *whole])},
def brief({arguments}):
    addresses = {"".join(f"0 if v{i} is None else v{i}.data_ptr(), " for i in places) or "()"}
    {", ".join(f"p{i}" for i in places) or "_"}{"," if places else ""} = addresses
    unaligned = ({" | ".join(f"p{i}" for i in places) or "0"}) & {ALIGNMENT - 1}
    return ({", ".join([str(number), "inference()", *plain, *sizes])},), unaligned, addresses
"""
    scope: dict[str, Any] = {"inference": torch.is_inference_mode_enabled}
    exec(compile(source, f"<signature of {', '.join(names)}>", "exec"), scope)
    return Form(scope["key"], scope["brief"], names, tuple(places))


def refusal(form: Form, values: tuple[Any, ...]) -> str | None:
    """Why a call with these values cannot be told by its key, if it cannot."""
    for i, value in enumerate(values):
        if i in form.tensors:
            if value is not None and type(value) not in TENSORS:
                return "a tensor of another class"
        elif type(value) not in PLAIN:
            return "an argument of an unusual type"
    return None
