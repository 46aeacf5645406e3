"""Ranges that overlap, against a walk over all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashinfer.gemm_workspace.audit_ranges import Ranges

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=10)


@given(ranges)
def test_the_last_one_has_the_address(drawn: list[tuple[int, int]]) -> None:
    found = Ranges(drawn)
    for address in range(-1, 45):
        covering = [each for each in drawn if each[0] <= address < sum(each)]
        assert found.find(address) == (covering[-1] if covering else None)
