"""Every case has its paragraph, and every hazard of the catalogue its case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "gpu" / "catalogue" / "cases"
#: B22 and B23 need a serving rig.
WANTED = {f"B{number}" for number in (*range(1, 22), *range(24, 33))} | {"D1", "D2"}


def registered() -> dict[str, set[str]]:
    """Hazards by case id, as the decorators say."""
    found: dict[str, set[str]] = {}
    for path in CASES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "case":
                name, _, hazards = (ast.literal_eval(argument) for argument in node.args[:3])
                found.setdefault(name, set()).update(hazards.split())
    return found


def test_every_case_of_the_issue_is_there() -> None:
    assert registered().keys() >= WANTED


def test_every_case_has_a_paragraph_with_its_hazards() -> None:
    text = (ROOT / "docs" / "cases.md").read_text()
    documented: dict[str, set[str]] = {}
    for names, hazards in re.findall(r"((?:\*\*[\w-]+\*\*(?:, )?)+) \(([A\d, ]+)\)", text):
        for name in re.findall(r"\*\*([\w-]+)\*\*", names):
            documented[name] = set(hazards.split(", "))
    assert documented.keys() == registered().keys()
    for name, hazards in registered().items():
        assert hazards <= documented[name], name


def test_hazards_exist() -> None:
    known = set(re.findall(r"^\| (A\d+) \|", (ROOT / "docs" / "hazards.md").read_text(), re.M))
    for name, hazards in registered().items():
        assert hazards <= known, name
