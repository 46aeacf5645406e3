"""The documents name what there is; the examples in docstrings hold."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from flashinfer.gemm_workspace import doctor, prometheus, stats
from flashinfer.gemm_workspace.doctor import __path__ as folder
from flashinfer.gemm_workspace.doctor import caches, judge

DOCS = Path(__file__).parents[3] / "docs"
MODULES = [each.name for each in pkgutil.iter_modules(folder) if each.name != "__main__"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"{doctor.__name__}.{name}")
    assert doctest.testmod(module).failed == 0


def test_examples_of_the_metrics() -> None:
    assert doctest.testmod(prometheus).failed == 0


def test_every_finding_is_documented() -> None:
    documented = set(re.findall(r"`([a-z0-9-]+)`", (DOCS / "doctor.md").read_text()))
    codes = {
        call.args[0].value
        for module in (judge, caches)
        for call in ast.walk(ast.parse(Path(module.__file__ or "").read_text()))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "Finding"
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(codes) > 15
    assert codes | {"log-refused", "log-capture", "log-memory"} <= documented


def test_every_metric_is_documented() -> None:
    documented = re.findall(r"^\| `(\w+)` \| (\w+)", (DOCS / "metrics.md").read_text(), re.M)
    told = stats()
    written = re.findall(r"^# TYPE (\w+) (\w+)$", prometheus.text(told), re.M)
    assert sorted(documented) == sorted(written)
