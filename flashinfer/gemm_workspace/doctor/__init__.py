"""Says whether an environment is affected by the moving workspace, by what, and what to do.

Two ways to run it::

    python -m flashinfer.gemm_workspace.doctor
    python .../site-packages/flashinfer/gemm_workspace/doctor

The first imports FlashInfer before it gets here, so it fails where FlashInfer does not import.
The second is for those: nothing but the standard library is imported into this process, whatever
is asked of torch, cuDNN or the driver is asked in a child process, and it runs from any checkout.
Neither makes a CUDA context or uses GPU memory.

Data flows one way: ``packages``, ``machine``, ``children`` (what there is) -> ``gather`` ->
``facts``; ``autotune``, ``logs`` (files that the operator names); all of it -> ``gate``,
``caches``, ``judge`` (pure functions) -> ``findings`` -> ``render``. ``cli`` puts them together.
"""
