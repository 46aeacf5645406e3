"""What the other GPU scripts do without a GPU: comparing, tabulating, refusing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def script(path: str) -> ModuleType:
    name = f"script_{Path(path).stem}"
    found = importlib.util.spec_from_file_location(name, ROOT / path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    before = list(sys.path)
    found.loader.exec_module(module)
    sys.path[:] = before
    return module


soak = script("tests/gpu/soak.py")
upstream = script("tests/gpu/upstream_tests.py")
sizes = script("tests/gpu/plan_sizes.py")
gpu_time = script("benchmarks/gpu_time.py")
host_cost = script("benchmarks/host_cost.py")
plot_host_cost = script("benchmarks/plot_host_cost.py")


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"wrong_calls": 0, "wrong_replays": 0, "canary_hits": 0, "died": ""}, ""),
        ({"wrong_replays": 3}, "3 wrong replays"),
        ({"canary_hits": 1, "died": "exit status -11"}, "1 canary hits, died (exit status -11)"),
        ({"memcheck_errors": 0}, ""),
        ({"memcheck_errors": 2}, "2 memcheck errors"),
        ({"memcheck_errors": None}, "no summary of memcheck"),
    ],
)
def test_what_is_wrong_with_a_soak(figures: dict[str, Any], said: str) -> None:
    assert soak.bad({"figures": figures}) == said


def test_soak_table_has_a_column_for_each_wheel() -> None:
    runs = {
        "release": {"figures": {"steps": 5, "wrong_replays": 2, "died": "a|b"}},
        "fork": {"figures": {"steps": 5, "wrong_replays": 0}},
    }
    lines = soak.table({"runs": runs}).splitlines()
    assert lines[0] == "| | release | fork |"
    assert "| wrong_replays | 2 | 0 |" in lines
    assert "| died | a\\|b |  |" in lines


@pytest.mark.parametrize(
    "arguments", [["--minutes", "0", "x.whl"], ["--steps", "0", "x.whl"], ["nowhere.whl"], []]
)
def test_soak_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_no_sanitizer_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "SANITIZERS", ("no-such-sanitizer",))
    assert soak.main(["--sanitize", "x.whl"]) == 2
    assert "no compute-sanitizer on the PATH" in capsys.readouterr().err


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="t[1]"/>
<testcase classname="tests.a" name="t[2]"><failure message="no"/></testcase>
<testcase classname="tests.a" name="t[3]"><skipped message="no"/></testcase>
<testcase classname="tests.a" name="t[4]"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_compared_case_by_case() -> None:
    first = upstream.outcomes(JUNIT)
    assert list(first.values()) == ["passed", "failed", "skipped", "error"]
    here = {**first, "tests.a::t[1]": "failed", "tests.a::t[2]": "passed"}
    del here["tests.a::t[3]"]
    seen = {"release": first, "fork": here}
    result = upstream.compared(seen, [("*t?2?", "the fork replaces it")])
    assert [row["test"] for row in result["expected"]] == ["tests.a::t[2]"]
    assert [(row["test"], row["here"]) for row in result["unexpected"]] == [
        ("tests.a::t[1]", "failed"),
        ("tests.a::t[3]", "absent"),
    ]
    text = upstream.table(result)
    assert "| fork | tests.a::t[3] | skipped | absent |  |" in text
    assert "the fork replaces it" in text
    assert "No other test" not in text
    assert "No other test" in upstream.table(upstream.compared({"a": first, "b": first}, []))


def test_a_difference_without_a_reason_is_refused() -> None:
    assert upstream.read_differences("# so\n\na::b* | why\n") == [("a::b*", "why")]
    with pytest.raises(upstream.BadInput, match=":2: wanted `pattern"):
        upstream.read_differences("a | why\nb\n")
    assert upstream.read_differences(upstream.DIFFERENCES.read_text()) == []


def test_upstream_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert upstream.main([str(tmp_path), "a.whl", "b.whl"]) == 2
    assert "has none of tests/gemm/test_bmm_fp8.py" in capsys.readouterr().err


def test_sizes_are_grouped_by_engine() -> None:
    shape = [1, 2, 3, 4]
    rows = [
        {"shape": shape, "plan": 0, "name": "m_eng0_k1=1", "bytes": 33554688},
        {"shape": shape, "plan": 1, "name": "m_eng0_k1=2", "bytes": 0},
        {"shape": shape, "plan": 2, "name": "m_eng7", "bytes": (40 << 20) + 1},
        {"shape": shape, "plan": 3, "error": "not built: so"},
    ]
    declined = {"shape": shape, "error": "E: declined"}
    seen = sizes.summary(
        {
            "90.fp8": {"cudnn": 1, "rows": rows},
            "120.fp4": {"cudnn": 1, "rows": [declined, declined]},
            "121.fp4": {"error": "no end after 9 s"},
        },
        4,
    )
    assert [row["engine"] for row in seen] == [
        "eng0",
        "eng7",
        "(not built)",
        "no plan (2 of 4 shapes): E: declined",
        "no plan (1 of 4 shapes): no end after 9 s",
    ]
    assert (seen[0]["least"], seen[0]["most"], seen[0]["covered"]) == (0, 33554688, True)
    assert not seen[1]["covered"]
    text = sizes.table(seen, 1)
    assert "| 90 | fp8 | eng0 | 2 | 0 | 33554688 | yes |" in text
    assert "| 90 | fp8 | eng7 | 1 | 41943041 | 41943041 | **no** |" in text


@pytest.mark.parametrize("sm", sizes.DEVICES)
def test_a_description_is_of_its_device(sm: int) -> None:
    assert json.loads(sizes.description(sm))["deviceVer"] == 10 * sm


def test_sizes_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--sm", "70"], ["--sm", "x"], ["--op", "int8"]):
        assert sizes.main(arguments) == 2
        assert "wanted some of 90,100" in capsys.readouterr().err


def test_ratios_are_of_neighbours_in_time() -> None:
    count = len(gpu_time.SHAPES)
    assert count == 20
    # The device slows down by half between the rounds; the fork is 2 % slower in each.
    release = [[[10.0 * slow, 5.0 * slow]] * count for slow in (1.0, 1.5, 1.5)]
    fork = [[[10.2 * slow, 5.0 * slow]] * count for slow in (1.0, 1.5, 1.5)]
    result = gpu_time.compared(release, fork)
    assert result["median_ratio"] == {"eager": 1.02, "replayed": 1.0}
    assert result["shapes"][0]["eager"] == {"release_us": 15.0, "fork_us": 15.3, "ratio": 1.02}


def test_gpu_time_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_time", str(tmp_path), str(tmp_path)])
    assert gpu_time.main() == 2
    assert "wanted two folders" in capsys.readouterr().err


def test_host_costs_are_held_against_their_like() -> None:
    """A call with an output given against torch's function with one, of the same rows."""
    names = ("torch._scaled_mm", "torch._scaled_mm out", "torch.mm", "torch.mm out")
    torch = {f"{name} M=16": {"median": 10.0 * 2**at} for at, name in enumerate(names)}
    torch["torch.mm M=1"] = {"median": 1.0}
    cases = {
        "bmm_fp8 cudnn M=16": 1.0,
        "bmm_fp8 cudnn out M=16": 0.5,
        "mm_bf16 cudnn M=16": 0.25,
        "mm_bf16 cudnn out M=16": 0.12,
    }
    fork = {case: {"median": 10.0} for case in cases}
    figures = {"torch": torch, "fork": fork}
    rows = list(host_cost.ratios(figures))
    assert {row["case"]: row["ratio"] for row in rows} == cases
    drawn = plot_host_cost.points({"us": figures, "ratios": rows})
    assert drawn["mm_bf16 cudnn out"] == {"fork": [10.0], "torch": [80.0]}


def test_what_cannot_be_drawn_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plots = plot_host_cost.plots
    (tmp_path / "a.json").write_text("{}")

    def missing(report: Any, folder: Path) -> list[Path]:
        raise ImportError("No module named 'matplotlib'")

    for draw, arguments, said in (
        (lambda report, _: [report["no"]], [], f"{tmp_path}/a.json is not a b: KeyError('no')"),
        (missing, [], "No module named 'matplotlib': pip install -r requirements/plot.txt"),
        (missing, ["-o", f"{tmp_path}/a.json"], f"-o {tmp_path}/a.json: {tmp_path}/a.json is no"),
    ):
        monkeypatch.setattr(sys, "argv", ["draw", f"{tmp_path}/a.json", *arguments])
        assert plots.command("draw", "a b", draw) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"draw: {said}")
        assert err.count("\n") == 1
