"""The hazard catalogue on a real GPU: the same cases over any FlashInfer wheels, side by side.

``python tests/gpu/catalogue WHEEL [WHEEL ...]`` unpacks each wheel into a folder of its own, runs
every case in a process of its own with a watchdog, and writes a table.

Data flows one way: ``case`` (what a case is) <- ``facts`` (what this machine and wheel have) <-
``ops``, ``memory`` (GEMMs and canaries) <- ``cases`` <- ``child`` (one case, one process). Of
these only ``case`` is known to the other side: ``wheels`` (unpack) <- ``launch`` (processes) <-
``schedule`` (which, when, how long) <- ``report`` <- ``runner``, which imports neither torch nor
FlashInfer.
"""
