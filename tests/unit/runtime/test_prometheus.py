"""``stats()`` as Prometheus text."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace import lane_workspace, stats
from flashinfer.gemm_workspace.prometheus import PREFIX, text

from .fake_device import FakeDevice, MiB

Series = dict[tuple[str, frozenset[tuple[str, str]]], int]

_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\})? (-?\d+)')
_LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\[\\"n])*)"')
_PLAIN = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parsed(exposition: str) -> Series:
    """The samples of a text in the exposition format; fails for one that is not in it."""
    assert exposition.endswith("\n")
    series: Series = {}
    kinds: dict[str, str] = {}
    helped: str | None = None
    for line in exposition[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, helped, words = line.split(" ", 3)
            assert words
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped
            assert name not in kinds
            kinds[name] = kind
            assert (kind == "counter") is name.endswith("_total")
        else:
            found = _SAMPLE.fullmatch(line)
            assert found, line
            name, labels, value = found.groups()
            assert name == helped  # samples follow their family
            pairs = frozenset(
                (label, re.sub(r'\\[\\"n]', lambda each: _PLAIN[each[0]], quoted))
                for label, quoted in _LABEL.findall(labels or "")
            )
            assert (name, pairs) not in series
            series[name, pairs] = int(value)
    return series


def labelled(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return PREFIX + name, frozenset(labels.items())


def test_a_fresh_process(device: FakeDevice) -> None:
    series = parsed(stats(format="prometheus"))
    assert series == {
        labelled(name): 0
        for name in (
            *("sealed", "graphs", "graphs_untied", "plans_held", "plans_kept_for_process"),
            *("builds_refused_total", "growths_total", "prepared_signatures"),
            *(f"prepared_{what}_total" for what in ("calls", "learnt", "failures")),
        )
    }


def test_lanes_that_are_alike_are_summed(device: FakeDevice) -> None:
    device.sm = (10, 0)
    for stream in (0, 5):
        device.streams[0] = stream
        lane_workspace("mm_fp4_workspace", 1, "cuda")
    with device.capturing(capture=7, stream=3, pool=(0, 5)):
        lane_workspace("mm_fp4_workspace", 1, "cuda")
    series = parsed(stats(format="prometheus"))
    common = {"device": "cuda:0", "lane": "mm_fp4_workspace", "storage": "arena"}
    assert series[labelled("bytes", **common, kind="stream")] == 2 * 40 * MiB
    assert series[labelled("lanes", **common, kind="stream")] == 2
    assert series[labelled("bytes", **common, kind="capture")] == 40 * MiB
    assert series[labelled("graphs")] == 1
    assert series[labelled("shared", device="cuda:0")] == 0


def test_the_sums_are_those_of_the_dict(device: FakeDevice) -> None:
    for stream in range(3):
        device.streams[0] = stream
        lane_workspace("mm_fp4_workspace", 1, "cuda")
    told = stats()
    series = parsed(text(told))
    sums = {
        name: sum(value for (each, _), value in series.items() if each == PREFIX + name)
        for name in ("bytes", "spare_bytes", "kept_bytes", "buffer_kept_bytes")
    }
    assert sums["bytes"] + sums["spare_bytes"] + sums["kept_bytes"] == told["lane_bytes"]
    assert sums["kept_bytes"] + sums["buffer_kept_bytes"] == told["kept_bytes"]


NAMES = st.text(max_size=10) | st.sampled_from(['"', "\\", "\n", "\\n", "cuda:0", 'a="b"} 1\n#'])
SIZES = st.integers(0, 1 << 50)


@given(
    st.fixed_dictionaries(
        {
            "lanes": st.lists(
                st.fixed_dictionaries(
                    {
                        "name": NAMES,
                        "device": NAMES,
                        "kind": NAMES,
                        "storage": NAMES,
                        "bytes": SIZES,
                        "kept_bytes": SIZES,
                    }
                )
            ),
            "spare": st.lists(
                st.fixed_dictionaries({"device": NAMES, "bytes": SIZES, "dirty": st.booleans()})
            ),
            "buffers": st.lists(
                st.fixed_dictionaries(
                    {"name": NAMES, "device": NAMES, "bytes": SIZES, "kept_bytes": SIZES}
                )
            ),
            "sharing": st.dictionaries(NAMES, st.booleans()),
            "sealed": st.booleans(),
            "graphs_alive": SIZES,
            "graphs_untied": SIZES,
            "plans_held": SIZES,
            "plans_kept_for_process": SIZES,
            "builds_refused": SIZES,
            "growths_total": SIZES,
            "prepared": st.fixed_dictionaries(
                dict.fromkeys(("remembered", "hits", "misses", "failures"), SIZES)
            ),
        }
    )
)
def test_any_names_survive(told: dict[str, Any]) -> None:
    series = parsed(text(told))
    for lane in told["lanes"]:
        labels = {key: lane[key] for key in ("device", "kind", "storage")}
        alike = [
            each
            for each in told["lanes"]
            if all(each[key] == lane[key] for key in ("name", *labels))
        ]
        key = labelled("bytes", lane=lane["name"], **labels)
        assert series[key] == sum(each["bytes"] for each in alike)
    assert series[labelled("growths_total")] == told["growths_total"]
    assert series[labelled("sealed")] == told["sealed"]


@pytest.mark.parametrize("format", ["json", "", "Prometheus", None])
def test_another_format(device: FakeDevice, format: Any) -> None:
    with pytest.raises(ValueError, match=r"format is .*, wanted one of dict, prometheus"):
        stats(format=format)


def test_the_dict_is_what_it_was(device: FakeDevice) -> None:
    assert stats(format="dict") == stats()


def test_it_costs_nothing_at_import() -> None:
    program = (
        "import sys, flashinfer.gemm_workspace\n"
        "ours = [name for name in sys.modules if name.startswith('flashinfer.gemm_workspace.')]\n"
        "assert not [name for name in ours if 'prometheus' in name or 'doctor' in name], ours"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
