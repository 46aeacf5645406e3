"""One label, one delta."""

from __future__ import annotations

from graft import label


def test_the_label_stands_for_the_delta_at_hand() -> None:
    assert label.LABELS[label.CURRENT] == label.at_hand(), (
        f"The runtime or the edits are not those of ws.{label.CURRENT}. If a wheel with that label "
        f"has been published, add row {label.CURRENT + 1} to LABELS in graft/label.py, else change "
        f"row {label.CURRENT}; the row is what `python -m graft label` prints: "
        f"{label.at_hand()}"
    )


def test_no_two_labels_stand_for_one_delta() -> None:
    assert len({row.delta for row in label.LABELS.values()}) == len(label.LABELS)


def test_the_digest_covers_the_runtime_and_every_edit() -> None:
    names = label.runtime_files().keys()
    assert "flashinfer/gemm_workspace/__init__.py" in names
    assert not [name for name in names if not name.startswith("flashinfer/gemm_workspace/")]
