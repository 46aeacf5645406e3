"""Build step of the fork: graft the edits and the runtime onto a FlashInfer release wheel.

The data flows one way::

    source (a release) -> edits (splices) -> delta (changed and added files) -> writer (the wheel)

``verify`` re-reads the finished wheel and shares no code with the editor.
This package never imports torch.
"""

TOOL = "flashinfer-gemm-workspace"
