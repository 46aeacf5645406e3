"""The nine edits: for each a table of modules that stay, and one of modules that change.

The modules are made up. What an edit cannot read must stop the build, so each edit has a third
table: the lines that it reports as not understood.
"""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from graft.edits import (
    EDITS,
    cache_buffers,
    default_size,
    gemm_buffers,
    grow_sites,
    plan_builds,
    plan_lifetime,
    prepared_launches,
    retries,
    sm12x_gate,
)
from graft.edits.base import Edit
from graft.module import Found, Module, apply

GEMM = "flashinfer/gemm/gemm_base.py"
OTHER = "flashinfer/gemm/other.py"
UTILS = "flashinfer/utils.py"
#: Their sites are functions that get a line more, so a second run would find them again.
ADD_TO_DEFINITIONS = (
    *(cache_buffers.EDIT, plan_builds.EDIT, plan_lifetime.EDIT),
    *(sm12x_gate.EDIT, prepared_launches.EDIT),
)


def find(edit: Edit, source: str, path: str, own: frozenset[str] = frozenset()) -> Found:
    return edit.find(Module(path, dedent(source).encode()), own)


def unchanged(edit: Edit, path: str, *sources: str) -> pytest.MarkDecorator:
    return _table("edit", "path", "source")([(edit, path, source) for source in sources])


def rewritten(edit: Edit, path: str, *pairs: tuple[str, str]) -> pytest.MarkDecorator:
    return _table("edit", "path", "before", "after")([(edit, path, *pair) for pair in pairs])


def refused(edit: Edit, path: str, *pairs: tuple[str, list[int]]) -> pytest.MarkDecorator:
    return _table("edit", "path", "source", "lines")([(edit, path, *pair) for pair in pairs])


def _table(*names: str):  # type: ignore[no-untyped-def]
    return lambda rows: pytest.mark.parametrize(
        names, rows, ids=[f"{row[0].name}-{number}" for number, row in enumerate(rows)]
    )


def check_unchanged(edit: Edit, path: str, source: str) -> None:
    found = find(edit, source, path)
    assert (found.sites, found.splices, found.not_understood) == ([], [], [])


def check_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    found = find(edit, before, path)
    assert found.not_understood == []
    assert found.sites
    done = apply(dedent(before).encode(), found.splices).decode()
    assert done == dedent(after)
    ast.parse(done)
    # Every name that a changed line uses is asked for, and none that it does not use.
    new = {n.id for n in ast.walk(ast.parse(done)) if isinstance(n, ast.Name)}
    assert found.imports <= new | grow_sites.OURS | plan_builds.OURS | {plan_lifetime.OURS}
    if edit not in ADD_TO_DEFINITIONS:
        check_unchanged(edit, path, done)


def check_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    assert [site.line for site in find(edit, source, path).not_understood] == lines


# -- grow-sites --------------------------------------------------------------------------------


@unchanged(
    grow_sites.EDIT,
    OTHER,
    "x = 1\n",
    "if w.numel() < n:\n    w = bigger(n)\n",
    "# w.resize_(n)\n'w.resize_(n)'\n",
    "w.resize(n)\n",
)
def test_grow_sites_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


@rewritten(
    grow_sites.EDIT,
    OTHER,
    (
        """\
        def run(w, n):
            if w.numel() < n:
                w.resize_(n)
            return w
        """,
        """\
        def run(w, n):
            w = _gemm_workspace_at_least(w, n)
            return w
        """,
    ),
    # On one line, after text whose bytes outnumber its characters.
    ("if w.numel() < n: w.resize_(n)\n", "w = _gemm_workspace_at_least(w, n)\n"),
    (
        "s = 'größe 語'; t = 1\nif größe.numel() < länge: größe.resize_(länge)  # schön\n",
        "s = 'größe 語'; t = 1\ngröße = _gemm_workspace_at_least(größe, länge)  # schön\n",
    ),
    # Two in nested functions; comments and blank lines around them stay.
    (
        """\
        @wrapped  # größer
        def outer(w, n):
            # before
            if w.numel() < n:  # it is small
                # this comment belongs to the growth
                w.resize_(n)

            # after
            def inner(v, m):

                if v.numel() < m:
                    v.resize_(m)
                return "ü"  # kept
            return inner
        """,
        """\
        @wrapped  # größer
        def outer(w, n):
            # before
            w = _gemm_workspace_at_least(w, n)

            # after
            def inner(v, m):

                v = _gemm_workspace_at_least(v, m)
                return "ü"  # kept
            return inner
        """,
    ),
)
def test_grow_sites_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    grow_sites.EDIT,
    OTHER,
    ("w.resize_(n)\n", [1]),
    ("if w.numel() < n:\n    w.resize_(n)\nelse:\n    y()\n", [2]),
    ("if w.numel() <= n:\n    w.resize_(n)\n", [2]),
    ("if w.numel() < n:\n    v.resize_(n)\n", [2]),
    ("if w.numel() < n:\n    w.resize_(m)\n", [2]),
    ("if w.numel() < n:\n    w.resize_(n)\n    w.zero_()\n", [2]),
    ("if w.numel() < n + 1:\n    w.resize_(n + 1)\n", [2]),
    ("if self.w.numel() < n:\n    self.w.resize_(n)\n", [2]),
    ("if w.numel() < n:\n    w.resize_(n, memory_format=f)\n", [2]),
    # Its text begins with "elif": no statement can take its place.
    ("if x:\n    y()\nelif w.numel() < n:\n    w.resize_(n)\n", [4]),
    ("if w.numel() < n:\n    w.resize_(n)\nw.resize_(m)\nresize_(w, n)\n", [3, 4]),
    # Two on one line.
    ("if w.numel() < n: w.resize_(n)\nf(a.resize_(1), b.resize_(2))\n", [2, 2]),
)
def test_grow_sites_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


def test_grow_sites_replaces_upstreams_own() -> None:
    before = """\
        import a

        @decorated
        def _gemm_workspace_at_least(w, n):
            return w

        class CudnnCaptureUnsafeError(RuntimeError):
            pass  # größer

        def keeps():
            pass
        """
    after = """\
        import a

        # _gemm_workspace_at_least: imported from flashinfer.gemm_workspace.

        # CudnnCaptureUnsafeError: imported from flashinfer.gemm_workspace.

        def keeps():
            pass
        """
    check_rewritten(grow_sites.EDIT, GEMM, before, after)
    assert find(grow_sites.EDIT, before, GEMM).imports == grow_sites.OURS
    check_unchanged(grow_sites.EDIT, OTHER, before)


# -- default-size ------------------------------------------------------------------------------


@unchanged(
    default_size.EDIT,
    OTHER,
    "DEFAULT_WORKSPACE_SIZE = 40 * 1024 * 1024\n",
    "OTHER_SIZE = 32 * 1024 * 1024\n",
    "x = DEFAULT_WORKSPACE_SIZE\n",
    "from a import DEFAULT_WORKSPACE_SIZE\n",
)
def test_default_size_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


@rewritten(
    default_size.EDIT,
    OTHER,
    (
        "ü = 'ü'; DEFAULT_WORKSPACE_SIZE = 32 * 1024 * 1024  # größe\nx = 1\n",
        "ü = 'ü'; DEFAULT_WORKSPACE_SIZE = 40 * 1024 * 1024  # größe\nx = 1\n",
    ),
    (
        "DEFAULT_WORKSPACE_SIZE = 33554432\n",
        "DEFAULT_WORKSPACE_SIZE = 40 * 1024 * 1024\n",
    ),
)
def test_default_size_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    default_size.EDIT,
    OTHER,
    ("DEFAULT_WORKSPACE_SIZE = 64 * 1024 * 1024\n", [1]),
    ("x = 1\nDEFAULT_WORKSPACE_SIZE = 32 << 20\n", [2]),
    ("DEFAULT_WORKSPACE_SIZE = size_for(32)\n", [1]),
    ("DEFAULT_WORKSPACE_SIZE = 32.0 * 1024 * 1024\n", [1]),
    # Not the plain assignment.
    ("DEFAULT_WORKSPACE_SIZE: int = 32 * 1024 * 1024\n", [1]),
    ("DEFAULT_WORKSPACE_SIZE = ALSO = 32 * 1024 * 1024\n", [1]),
    ("def f():\n    DEFAULT_WORKSPACE_SIZE = 32 * 1024 * 1024\n", [2]),
    ("if x:\n    DEFAULT_WORKSPACE_SIZE = 32 * 1024 * 1024\n", [2]),
)
def test_default_size_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


# -- gemm-buffers ------------------------------------------------------------------------------


@unchanged(
    gemm_buffers.EDIT,
    OTHER,
    "get('mm_fp4_workspace', n, d)\n",
    "def _get_cache_buf(name, n, d):\n    pass\n",
    # A descriptor that its kernel reads back.
    "_get_cache_buf('cake_nvfp4_svdquant_tma_workspace', n, d)\n",
)
def test_gemm_buffers_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


def test_gemm_buffers_leaves_stateful_modules_alone() -> None:
    (path,) = gemm_buffers.STATEFUL
    check_unchanged(gemm_buffers.EDIT, path, "_get_cache_buf('carrier', n, d, zero_init=True)\n")


@rewritten(
    gemm_buffers.EDIT,
    OTHER,
    (
        "'größe'; w = _get_cache_buf('mm_fp4_workspace', SIZE, a.device)  # ü\n",
        "'größe'; w = lane_workspace('mm_fp4_workspace', SIZE, a.device)  # ü\n",
    ),
    (
        """\
        def outer(a):
            def inner():
                return utils._get_stream_cache_buf(
                    # größe
                    "trllm_low_latency_gemm", size(a), a.device
                )
            return inner, _get_cache_buf("grouped_mm_workspace", n, d)
        """,
        """\
        def outer(a):
            def inner():
                return lane_workspace(
                    # größe
                    "trllm_low_latency_gemm", size(a), a.device
                )
            return inner, lane_workspace("grouped_mm_workspace", n, d)
        """,
    ),
)
def test_gemm_buffers_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    gemm_buffers.EDIT,
    OTHER,
    ("_get_cache_buf('nobody_knows_this_name', n, d)\n", [1]),
    ("x = 1\n_get_cache_buf(name, n, d)\n", [2]),
    ("_get_cache_buf(f'mm_{kind}_workspace', n, d)\n", [1]),
    ("_get_cache_buf('mm_fp4_workspace', n)\n", [1]),
    ("_get_cache_buf('mm_fp4_workspace', n, device=d)\n", [1]),
    ("_get_cache_buf('mm_fp4_workspace', n, d, True)\n", [1]),
    ("_get_cache_buf('mm_fp4_workspace', n, d, zero_init=True)\n", [1]),
    ("_get_cache_buf(*arguments)\n_get_cache_buf()\n", [1, 2]),
)
def test_gemm_buffers_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


@pytest.mark.parametrize(
    ("name", "size"),
    [("mm_bf16_workspace", "32 * 1024 * 1024"), ("mm_fp4_workspace", "DEFAULT_WORKSPACE_SIZE")],
)
def test_gemm_buffers_keeps_a_length_that_is_in_the_tuners_key(name: str, size: str) -> None:
    before = f"w = _get_cache_buf('{name}', DEFAULT_WORKSPACE_SIZE, 'ü', )\n"
    found = find(gemm_buffers.EDIT, before, OTHER, frozenset({"mm_bf16_workspace"}))
    after = apply(before.encode(), found.splices).decode()
    assert after == f"w = lane_workspace('{name}', {size}, 'ü', )\n"


def test_gemm_buffers_does_not_guess_a_length_that_is_in_the_tuners_key() -> None:
    before = "w = _get_cache_buf('mm_bf16_workspace', n, d)\n"
    found = find(gemm_buffers.EDIT, before, OTHER, frozenset({"mm_bf16_workspace"}))
    assert [site.line for site in found.not_understood] == [1]


# -- cache-buffers -----------------------------------------------------------------------------


@unchanged(
    cache_buffers.EDIT,
    UTILS,
    "def other(name, n, device, zero_init=False):\n    pass\n",
    "class A:\n    def _get_cache_buf(name, n, device, zero_init):\n        pass\n",
    "_get_cache_buf(1)\n",
)
def test_cache_buffers_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


@rewritten(
    cache_buffers.EDIT,
    UTILS,
    (
        '''\
        def _get_cache_buf(name: str, bytes: int, device, zero_init=False):
            """Größe."""
            # one comment that goes
            found = cache.get(name)
            return found  # ü

        x = 1  # kept
        ''',
        '''\
        def _get_cache_buf(name: str, bytes: int, device, zero_init=False):
            """Größe."""
            # one comment that goes
            return cache_buffer(_cache_buf, name, bytes, device, zero_init)  # ü

        x = 1  # kept
        ''',
    ),
    (
        """\
        @decorated
        def _get_stream_cache_buf(name, num_bytes, device, zero_init=False):
            # größe
            return per_stream(name)
        def _get_cache_buf(name, num_bytes, device, zero_init=False):
            return shared(name)
        """,
        """\
        @decorated
        def _get_stream_cache_buf(name, num_bytes, device, zero_init=False):
            # größe
            if is_lane(name):
                return reserve_lane(name, num_bytes, device)
            return per_stream(name)
        def _get_cache_buf(name, num_bytes, device, zero_init=False):
            return cache_buffer(_cache_buf, name, num_bytes, device, zero_init)
        """,
    ),
)
def test_cache_buffers_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    cache_buffers.EDIT,
    UTILS,
    ("def _get_cache_buf(name, n, device):\n    pass\n", [1]),
    ("def _get_cache_buf(key, n, device, zero_init):\n    pass\n", [1]),
    ("x = 1\ndef _get_stream_cache_buf(name, n, device, fill):\n    pass\n", [2]),
    ("def _get_cache_buf(name, n, device, zero_init, *, more):\n    pass\n", [1]),
    ("def _get_cache_buf(name, n, device, zero_init, *more):\n    pass\n", [1]),
    ("class _get_cache_buf:\n    pass\n", [1]),
    ("async def _get_cache_buf(name, n, device, zero_init):\n    pass\n", [1]),
)
def test_cache_buffers_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


# -- plan-builds -------------------------------------------------------------------------------


@unchanged(
    plan_builds.EDIT,
    OTHER,
    "def f():\n    graph.execute(handle=h)\n",
    # Called by builders only, which are guarded.
    "def _finalize_cudnn_graph_for_tactic(g, t):\n    g.build_plans()\n",
)
def test_plan_builds_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


@rewritten(
    plan_builds.EDIT,
    OTHER,
    (
        """\
        'größe'
        @traced  # ü
        @functools.lru_cache(maxsize=7)
        def make(shape, device):
            # ü
            graph = start(shape)
            graph.build_plans()
            graph.build_plan_at_index(3)
            return graph
        """,
        """\
        'größe'
        @traced  # ü
        @functools.lru_cache(maxsize=7)
        @guard_plan_build
        def make(shape, device):
            # ü
            graph = start(shape)
            graph.build_plans()
            graph.build_plan_at_index(3)
            return graph
        """,
    ),
    (
        """\
        def outer():
            @lru_cache
            def make(handle, shape):
                return _finalize_cudnn_graph_for_tactic(start(handle), -1)
            return make
        """,
        """\
        def outer():
            @lru_cache
            @guard_plan_build
            def make(handle, shape):
                return _finalize_cudnn_graph_for_tactic(start(handle), -1)
            return make
        """,
    ),
    (
        "def handle_of(device, s):\n    'ü'; h = cudnn.create_handle()  # größe\n    return h\n",
        "def handle_of(device, s):\n"
        "    'ü'; h = create_cudnn_handle(cudnn.create_handle, device)  # größe\n"
        "    return h\n",
    ),
)
def test_plan_builds_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    plan_builds.EDIT,
    OTHER,
    ("graph.build_plans()\n", [1]),
    ("def make(device):\n    graph.build_plans()\n", [2]),  # not remembered
    ("@lru_cache\ndef make(shape):\n    graph.build_plans()\n", [3]),  # whose device?
    (
        "@lru_cache\ndef make(shape):\n    g.build_plans()\n    g.build_plan_at_index(0)\n",
        [3, 4],
    ),
    ("def handle_of(index):\n    return cudnn.create_handle()\n", [2]),
    ("def handle_of(device):\n    return cudnn.create_handle(device)\n", [2]),
    ("def handle_of(device):\n    return other.create_handle()\n", [2]),
    ("h = cudnn.create_handle()\n", [1]),
)
def test_plan_builds_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


def test_plan_builds_replaces_upstreams_own() -> None:
    before = """\
        class CudnnPlanBuildInCaptureError(RuntimeError):
            'ü'
        def _check_cudnn_plan_build_not_capturing(device):
            pass
        """
    after = """\
        # CudnnPlanBuildInCaptureError: imported from flashinfer.gemm_workspace.
        # _check_cudnn_plan_build_not_capturing: imported from flashinfer.gemm_workspace.
        """
    check_rewritten(plan_builds.EDIT, GEMM, before, after)


# -- retries -----------------------------------------------------------------------------------


@unchanged(
    retries.EDIT,
    OTHER,
    # No retry: nothing else is run in the place of what was asked for.
    "try:\n    a()\nexcept Exception:\n    log()\n",
    "try:\n    a(tactic=-1)\nexcept Exception:\n    raise\n",
    # Lets it through already, alone or among others.
    "try:\n    a()\nexcept CudnnCaptureUnsafeError:\n    raise\nexcept:\n    b(tactic=-1)\n",
    "try:\n    a()\nexcept (E, CudnnCaptureUnsafeError):\n    raise\nexcept:\n    b(tactic=-1)\n",
    # Cannot catch it.
    "try:\n    a()\nexcept KeyError:\n    b(tactic=-1)\n",
)
def test_retries_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


@rewritten(
    retries.EDIT,
    OTHER,
    (
        """\
        def run(t):
            try:
                return go(tactic=t)
            # größe
            except Exception as error:  # ü
                note(error)
                return go("ü", tactic=-1)
        """,
        """\
        def run(t):
            try:
                return go(tactic=t)
            # größe
            except CudnnCaptureUnsafeError:
                raise
            except Exception as error:  # ü
                note(error)
                return go("ü", tactic=-1)
        """,
    ),
    (
        """\
        try:
            try:
                a()
            except:
                b(x, tactic=-1)
        except KeyError:
            pass
        except BaseException:
            c(tactic=-1)
        """,
        """\
        try:
            try:
                a()
            except CudnnCaptureUnsafeError:
                raise
            except:
                b(x, tactic=-1)
        except KeyError:
            pass
        except CudnnCaptureUnsafeError:
            raise
        except BaseException:
            c(tactic=-1)
        """,
    ),
)
def test_retries_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    retries.EDIT,
    OTHER,
    # The error is a RuntimeError, so these swallow it too.
    ("try:\n    a()\nexcept RuntimeError:\n    b(tactic=-1)\n", [3]),
    ("try:\n    a()\nexcept (KeyError, Exception):\n    b(tactic=-1)\n", [3]),
    # Caught by name, and retried all the same.
    ("try:\n    a()\nexcept CudnnCaptureUnsafeError:\n    b(tactic=-1)\n", [3]),
)
def test_retries_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


# -- plan-lifetime -----------------------------------------------------------------------------


@unchanged(
    plan_lifetime.EDIT,
    OTHER,
    "def f(a, graph):\n    cursor.execute(a)\n",
    "def f(a, graph):\n    # graph.execute(handle=h)\n    return a\n",
)
def test_plan_lifetime_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


@rewritten(
    plan_lifetime.EDIT,
    OTHER,
    (
        '''\
        @traced  # ü
        def run(graph, a):
            """Größe."""
            # ü
            w = size(graph)
            graph.execute({a: w}, w, handle=h)
        ''',
        '''\
        @traced  # ü
        @device_locked
        def run(graph, a):
            """Größe."""
            # ü
            _retain_cudnn_graph_if_capturing(graph)
            w = size(graph)
            graph.execute({a: w}, w, handle=h)
        ''',
    ),
    # Fetches its own plan: held from there on.
    (
        """\
        def outer():
            def run(a, b):
                s = "ü"
                graph, ids = make(
                    a, b  # größe
                )  # ü
                graph.execute_plan_at_index(ids, 0, handle=h)
                graph.execute(ids, handle=h)
            return run
        """,
        """\
        def outer():
            @device_locked
            def run(a, b):
                s = "ü"
                graph, ids = make(
                    a, b  # größe
                )  # ü
                _retain_cudnn_graph_if_capturing(graph)
                graph.execute_plan_at_index(ids, 0, handle=h)
                graph.execute(ids, handle=h)
            return run
        """,
    ),
    # Upstream holds it here already; what holds it is the fork's.
    (
        """\
        def _retain_cudnn_graph_if_capturing(graph):
            keep.append(graph)
        def run(graph, a):
            _retain_cudnn_graph_if_capturing(graph)
            graph.execute(a, handle=h)
        """,
        """\
        # _retain_cudnn_graph_if_capturing: imported from flashinfer.gemm_workspace.
        @device_locked
        def run(graph, a):
            _retain_cudnn_graph_if_capturing(graph)
            graph.execute(a, handle=h)
        """,
    ),
)
def test_plan_lifetime_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    plan_lifetime.EDIT,
    OTHER,
    ("graph.execute(v, handle=h)\n", [1]),
    ("def run(graph, x):\n    graph.execute(x, handle=h)\n", [2]),  # which tensor's device?
    ("def run(a):\n    plan.execute(a, handle=h)\n    plan.execute(a, handle=h)\n", [2, 3]),
    # One branch fetches a plan, the other one has none that could be held.
    ("def run(a):\n    if a:\n        graph, i = make(a)\n    graph.execute(i, handle=h)\n", [4]),
)
def test_plan_lifetime_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


# -- sm12x-gate --------------------------------------------------------------------------------


@unchanged(
    sm12x_gate.EDIT,
    GEMM,
    "def other(a, runner_names):\n    return bmm_fp8\n",
)
def test_sm12x_gate_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


@rewritten(
    sm12x_gate.EDIT,
    GEMM,
    (
        '''\
        def _heuristic_func_bmm_fp8(names, A, B):
            chosen = [n for n in names if n != "größe"]
            "ü"; return chosen  # ü
        @traced
        def fp8_gemm_sm100(a, b, out, runner_names):
            """Größe."""

            run(a, runner_names)
        ''',
        '''\
        def _heuristic_func_bmm_fp8(names, A, B):
            chosen = [n for n in names if n != "größe"]
            "ü"; return gate_sm12x_cudnn(chosen, A)  # ü
        @traced
        def fp8_gemm_sm100(a, b, out, runner_names):
            """Größe."""

            runner_names = gate_sm12x_cudnn(runner_names, a)
            run(a, runner_names)
        ''',
    ),
    # Upstream's own gate goes.
    (
        """\
        def _heuristic_func_bmm_fp8(names, A):
            chosen = []
            if CUDNN_AVAILABLE and "cudnn" in names:
                # größe
                if too_old(A):
                    say("ü")
                else:
                    chosen.append("cudnn")
            # ü
            return chosen
        """,
        """\
        def _heuristic_func_bmm_fp8(names, A):
            chosen = []
            if CUDNN_AVAILABLE and "cudnn" in names:
                chosen.append("cudnn")
            # ü
            return gate_sm12x_cudnn(chosen, A)
        """,
    ),
)
def test_sm12x_gate_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    sm12x_gate.EDIT,
    GEMM,
    ("def fp8_gemm_sm100(b, runner_names):\n    pass\n", [1]),
    ("x = 1\ndef fp8_gemm_sm100(a, runners):\n    pass\n", [2]),
    ("def fp8_gemm_sm100():\n    pass\n", [1]),
    ("def _heuristic_func_bmm_fp8(names, B):\n    return names\n", [1]),
    ("def _heuristic_func_bmm_fp8(names, A):\n    return list(names)\n", [1]),
    ("def _heuristic_func_bmm_fp8(n, A):\n    if n:\n        return n\n    return A\n", [1]),
    ("class fp8_gemm_sm100:\n    pass\n", [1]),
)
def test_sm12x_gate_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


# -- prepared-launches -------------------------------------------------------------------------

TUNER = "flashinfer/autotuner.py"


@unchanged(
    prepared_launches.EDIT,
    GEMM,
    "def other(a):\n    return bmm_fp8(a)\n",
    "def f(a):\n    @flashinfer_api\n    def mm_fp4(a):\n        pass\n",  # not a public one
    "graph.execute(a)\nother.bmm_fp8(a)\nbmm_fp8_run_with_algo(a)\nmodule.mxfp8_gemm(a)\n",
    "class A:\n    def __call__(self, inputs, **kwargs):\n        pass\n",
)
def test_prepared_launches_unchanged(edit: Edit, path: str, source: str) -> None:
    check_unchanged(edit, path, source)


def test_prepared_launches_leaves_other_classes_of_the_tuner_alone() -> None:
    source = "class A:\n    def __call__(self, inputs, **kwargs):\n        pass\n"
    check_unchanged(prepared_launches.EDIT, TUNER, source)


@rewritten(
    prepared_launches.EDIT,
    GEMM,
    (
        """\
        s = "größe"
        # größe
        @backend_requirement(
            {"ü": a},
        )
        @flashinfer_api(trace=t)
        def bmm_fp8(
            A, B,
        ):
            return A
        @flashinfer_api(trace=t)
        def mm_fp8(a): pass
        """,
        """\
        s = "größe"
        # größe
        @prepared_launches
        @backend_requirement(
            {"ü": a},
        )
        @flashinfer_api(trace=t)
        def bmm_fp8(
            A, B,
        ):
            return A
        @prepared_launches
        @flashinfer_api(trace=t)
        def mm_fp8(a): pass
        """,
    ),
    (
        """\
        def run(graph, a):
            "ü"; graph.execute(a, w, handle=h)  # ü
            graph.execute_plan_at_index(
                a, handle=h
            )
        def forward(self):
            module.bmm_fp8(a); module.bmm_fp8_run_with_algo(a)
            module.mm_bf16_cublaslt_run_with_algo(
                a
            )
            raw_module.mxfp8_gemm(a)
        """,
        """\
        def run(graph, a):
            "ü"; watched(graph).execute(a, w, handle=h)  # ü
            watched(graph).execute_plan_at_index(
                a, handle=h
            )
        def forward(self):
            watched(module).bmm_fp8(a); watched(module).bmm_fp8_run_with_algo(a)
            watched(module).mm_bf16_cublaslt_run_with_algo(
                a
            )
            watched(raw_module).mxfp8_gemm(a)
        """,
    ),
)
def test_prepared_launches_rewritten(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@rewritten(
    prepared_launches.EDIT,
    TUNER,
    (
        """\
        class TunableRunner(ABC):
            def forward(self, inputs, **kwargs):
                pass
            def __call__(self, inputs, **kwargs):
                return self.forward(inputs, **kwargs)
        """,
        """\
        class TunableRunner(ABC):
            def forward(self, inputs, **kwargs):
                pass
            @noted_runner
            def __call__(self, inputs, **kwargs):
                return self.forward(inputs, **kwargs)
        """,
    ),
)
def test_prepared_launches_notes_runners(edit: Edit, path: str, before: str, after: str) -> None:
    check_rewritten(edit, path, before, after)


@refused(
    prepared_launches.EDIT,
    GEMM,
    ("@backend_requirement({})\ndef bmm_fp8(a):\n    pass\n", [2]),
    ("x = 1\ndef mm_fp4(a):\n    pass\n", [2]),
    ("class mm_bf16:\n    pass\n", [1]),
    ("def run(a):\n    plan().execute(a, handle=h)\n    a.b.execute(a, handle=h)\n", [2, 3]),
)
def test_prepared_launches_refused(edit: Edit, path: str, source: str, lines: list[int]) -> None:
    check_refused(edit, path, source, lines)


@refused(
    prepared_launches.EDIT,
    TUNER,
    ("class TunableRunner:\n    def __call__(self, inputs, tactic):\n        pass\n", [2]),
    (
        "class TunableRunner:\n    @x\n    def __call__(self, inputs, **kwargs):\n        pass\n",
        [3],
    ),
)
def test_prepared_launches_refused_runners(
    edit: Edit, path: str, source: str, lines: list[int]
) -> None:
    check_refused(edit, path, source, lines)


# -- all of them -------------------------------------------------------------------------------


def test_every_edit_says_what_it_is_for() -> None:
    assert len({edit.name for edit in EDITS}) == len(EDITS) == 9
    for edit in EDITS:
        assert edit.summary
        assert edit.hazards
        assert edit.upstream


@pytest.mark.parametrize(
    "path",
    [
        "flashinfer/data/csrc/gemm.py",
        "flashinfer/attention/gemm_base.py",
        "flashinfer/gemm/gemm_base.cu",
        "flashinfer/experimental/gemm.py",
    ],
)
def test_no_edit_looks_elsewhere(path: str) -> None:
    assert not [edit.name for edit in EDITS if edit.in_scope(path)]
