"""Prepared launches: what a call resolved is remembered for the next call of its signature.

A release decides anew at each call which backend, runner, tactic and plan an op runs, which costs
several times what the launch costs. The first call of a signature takes the release's own path
and is watched (:mod:`.notes`); the next ones make the same launch at once (:mod:`.launches`).

The signature is the key of the arguments (:mod:`.signature`) and all else that the path looks at:
whatever of it can change is asked at each call, and a change either forgets everything or sends
the call down the release's path: a capture, another current device, a tracing or function mode,
the tuner (:mod:`.tuning`), the environment.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from . import captures, torch_internals
from . import state as _state
from .device import CudaDevice
from .holds import collect
from .notes import Notes, noted
from .state import State, log

if TYPE_CHECKING:
    # Imported by the first calls: the release is to import as fast as it did.
    from .launches import Call, Prepared
    from .native_calls import Call as NativeCall
    from .native_calls import Fast, Source
    from .signature import Form
    from .tuning import Tuning

F = TypeVar("F", bound=Callable[..., Any])

# Signatures remembered in all; the oldest is forgotten for a new one.
SIGNATURES = 4096

# Plans built in the process after which the release's caches may be full: the smallest holds 1,024
# (0.6.12; 2,048 later), and there is one a kind of plan.
PLANS = 1000

# Ways to write a call of one op; further ones take the release's path.
FORMS = 64

# On the way of every call, so bound once.
_dynamo_tracing = torch_internals.dynamo_tracing
_modes_active = torch_internals.modes_active
_functions_active = torch_internals.function_modes_active
_here = torch_internals.current_device
_capturing = torch_internals.is_current_stream_capturing
_raw_stream = torch_internals.raw_stream


class _Known:
    """A signature: its launch, or why there is none."""

    __slots__ = ("call", "gone", "hits", "index", "key", "native", "plan", "source", "tuning")

    def __init__(self, key: Hashable, index: int, tuning: Tuning, made: Prepared | None) -> None:
        self.key, self.index, self.tuning = key, index, tuning
        self.call: Call | None = None if made is None else made.call
        self.source: Source | None = None if made is None else made.source
        self.plan: int | None = None if made is None else made.plan
        self.native: NativeCall | None = None
        self.gone = False
        self.hits = 0  # of threads that count at once one may be lost


class _Quick:
    """A signature, told by one call into C++: every tensor of it is aligned.

    ``pick`` takes the tensors out of the arguments, one that comes twice once: ``twice`` has the
    places of its two, which must then be the same.
    """

    __slots__ = ("alike", "known", "pick", "twice")

    def __init__(
        self,
        known: _Known,
        pick: Callable[[tuple[Any, ...]], Any],
        alike: Callable[..., bool],
        twice: tuple[tuple[int, int], ...],
    ) -> None:
        self.known, self.pick, self.alike, self.twice = known, pick, alike, twice


class _Memory:
    """All that is remembered, over one state of the runtime."""

    def __init__(self, state: State) -> None:
        self.state = state
        # A remembered launch does not pass where a workspace is filled with zeros.
        self.enabled = state.settings.prepared and not state.settings.zero
        # By key, oldest first; and by brief key, those that can be told quickly.
        self.table: dict[Hashable, _Known] = {}
        self.quick: dict[Hashable, _Quick] = {}
        self.by_plan: dict[int, list[_Known]] = {}
        state.plan_held, state.plan_built = self.plan_held, self.plan_built
        self._generations = itertools.count(1)
        self.generation = 0
        self.lock = threading.Lock()
        self.hits = 0  # of signatures that are forgotten
        self.misses = self.forgotten = self.failures = 0
        self.refusals: Counter[str] = Counter()
        self.tunings: dict[int, Tuning] = {}
        self.stream = _stream if type(state.device) is CudaDevice else self._any_stream

    def _any_stream(self, index: int) -> int | None:
        """As :func:`_stream`, on a device that is not the real one."""
        device = self.state.device
        if device.current_index() != index or device.is_capturing(index):
            return None
        return device.raw_stream(index)

    def tuning(self, home: dict[str, Any]) -> Tuning:
        """That of the module whose globals are ``home``."""
        from .tuning import Tuning

        known = self.tunings.get(id(home))
        return known or self.tunings.setdefault(id(home), Tuning(home, forget))

    def add(self, known: _Known, generation: int) -> None:
        """Remember, unless everything was forgotten since ``generation``."""
        with self.lock:
            while len(self.table) >= SIGNATURES:
                self._let_go(next(iter(self.table)))
            if len(self.quick) >= 2 * SIGNATURES:  # in inference mode and not
                self.quick = {}
            table = self.table
            table[known.key] = known
            if self.generation != generation:
                table.pop(known.key, None)
            elif known.plan is not None:
                self.by_plan.setdefault(known.plan, []).append(known)
        if known.call is not None and self.must_not_serve(known.plan):
            self.plan_held(known.plan)  # since this call began

    def must_not_serve(self, plan: int | None) -> bool:
        """Whether calls that run the plan with this id take the release's path: a live graph
        holds it, or the release's caches may be full.

        A capture looks for its plan in those caches alone. A call that is served from here does
        not count as a use there: a full cache would evict the plan of a shape that was just
        called, and the capture after it would be refused.
        """
        return plan is not None and (plan in self.state.held or self.state.plans_built >= PLANS)

    def plan_built(self) -> None:
        """One more plan was built; with the last that is sure to fit the release's caches, plans
        are found by the release alone from now on."""
        if self.state.plans_built == PLANS:
            for plan in list(self.by_plan):
                self.plan_held(plan)

    def plan_held(self, plan: int | None) -> None:
        """A live graph holds the plan with this id: forget its signatures.

        A plan that is held lives, whether the release's cache has it or not.
        """
        with self.lock:
            for known in () if plan is None else self.by_plan.pop(plan, ()):
                self._end(known)

    def drop(self, known: _Known) -> None:
        """Forget one signature, whose launch failed."""
        with self.lock:
            self.failures += 1
            self._end(known)

    def _end(self, known: _Known) -> None:
        """No call is launched by ``known`` any more; the caller has the lock."""
        if known.native is not None:
            known.native.close()
        if self.table.get(known.key) is known:
            self._let_go(known.key)

    def _let_go(self, key: Hashable) -> None:
        known = self.table.pop(key)
        known.gone = True
        if known.plan is not None:
            others = [each for each in self.by_plan.pop(known.plan, ()) if each is not known]
            if others:
                self.by_plan[known.plan] = others
        self.hits += known.hits
        self.forgotten += 1

    def find(
        self,
        form: Form,
        brief: Hashable,
        unaligned: int,
        values: tuple[Any, ...],
    ) -> tuple[Hashable, _Known | None]:
        """The key of a call, and what is known of it; the next such call is told quickly."""
        key = form.key(*values)
        known = self.table.get(key)
        if known is None or known.call is None or unaligned:
            return key, known
        before = self.quick.get(brief)
        # A brief key that two signatures share is the first one's.
        if before is None or before.known.gone:
            quick = _quick(known, form, values)
            if quick is not None:
                self.quick[brief] = quick
                if known.gone:  # forgotten since it was found: not in the dict that is new by then
                    self.quick.pop(brief, None)
        return key, known

    def hand_over(
        self, op: _Op, way: Hashable, form: Form, known: _Known, values: tuple[Any, ...]
    ) -> None:
        """Let the native library launch calls of this signature from now on."""
        from . import native
        from .native_calls import Fast, hand_over

        generation = self.generation
        with self.lock:
            source, known.source = known.source, None  # one thread, once
            found = native.library()
            if source is None or found is None or self.generation != generation:
                return
            fast = op.fast.get(way)
            if fast is None or fast[0] is not self or fast[1] != generation:
                way_in = Fast(found, form)
                fast = op.fast[way] = (self, generation, way_in.run, way_in, known.tuning)
        try:
            made = hand_over(fast[3], source, values)
            with self.lock:
                known.native = made
                if known.gone:  # forgotten while its plan was rebuilt
                    made.close()
        except Exception as error:
            # Whatever it is: the call that was just made is good, and so is the Python way.
            self.refusals[f"native: {error}"] += 1

    def forget(self) -> None:
        """Forget everything. A call that is being learnt now will not be remembered."""
        # In this order, and without the lock: the caller may hold the tuner's, and a thread that
        # adds looks at the generation after it has added.
        self.generation = next(self._generations)
        self.quick = {}
        self.by_plan = {}
        table, self.table = self.table, {}
        for known in list(table.values()):
            known.gone = True  # so that who found it before does not go by it later
            self.hits += known.hits
        self.forgotten += len(table)


def _quick(known: _Known, form: Form, values: tuple[Any, ...]) -> _Quick | None:
    places: list[int] = []
    twice: list[tuple[int, int]] = []
    for i in form.tensors:
        if values[i] is None:
            continue
        first = next((j for j in places if values[j] is values[i]), None)
        if first is None:
            places.append(i)
        else:
            twice.append((first, i))
    alike = torch_internals.tensors_alike(tuple(values[i] for i in places))
    if alike is None or len(places) < 2:
        return None
    return _Quick(known, operator.itemgetter(*places), alike, tuple(twice))


_memory: _Memory | None = None


def _current_memory() -> _Memory:
    global _memory
    memory = _memory
    if memory is None or memory.state is not _state.current:
        memory = _memory = _Memory(_state.current)
    return memory


def _stream(index: int) -> int | None:
    """Handle of the current stream of device ``index``; ``None`` while it captures, or while
    another device is the current one."""
    if _here() != index or _capturing():
        return None
    return _raw_stream(index)


def forget() -> None:
    """Forget every signature; each next call takes the release's own path again."""
    memory = _memory
    if memory is not None:
        memory.forget()


def report() -> dict[str, Any]:
    """Counts, as plain data.

    ``enabled``; ``remembered``: signatures now; ``hits``: calls that took a remembered launch
    (counted without a lock: threads that count at once may lose one); ``misses``: calls that
    were watched; ``forgotten``: signatures dropped since something changed or the table was
    full; ``failures``: remembered launches that failed or whose plan was gone, after which the
    release's path ran; ``refused``: by reason, watched calls that cannot be repeated, and launches
    that cannot be native; ``native``: see :func:`.native.report`, its launches are no hits.
    """
    from . import native

    memory = _current_memory()
    known = list(memory.table.values())
    return {
        "enabled": memory.enabled,
        "remembered": sum(each.call is not None for each in known),
        "hits": memory.hits + sum(each.hits for each in known),
        "misses": memory.misses,
        "forgotten": memory.forgotten,
        "failures": memory.failures,
        "refused": dict(memory.refusals),
        "native": native.report(),
    }


class _Op:
    """A public op: how it may be called, and how a call is learnt."""

    def __init__(self, release: Callable[..., Any], original: Callable[..., Any]) -> None:
        self.release = release
        self.home: dict[str, Any] = original.__globals__
        parameters = inspect.signature(original).parameters.values()
        self.positional = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self.required = {p.name for p in parameters if p.default is p.empty}
        self.defaults = {p.name: p.default for p in parameters}
        # Added by the release's decorator, which takes it out again.
        self.names = frozenset(self.defaults) | {"skip_check"}
        self.tensors = frozenset(p.name for p in parameters if "Tensor" in str(p.annotation))
        # By the number of positional arguments and the names of the others, in their order.
        self.forms: dict[Hashable, Form | None] = {}
        # By the same: whose memory and of which generation, how to call natively, and the tuning.
        self.fast: dict[Hashable, tuple[_Memory, int, Callable[..., Any], Fast, Tuning]] = {}

    def form(self, count: int, keywords: tuple[str, ...]) -> Form | None:
        """The form of such a call; ``None`` for a wrong one, and for one too many."""
        from .signature import form

        names = (*self.positional[:count], *keywords)
        right = (
            count <= len(self.positional)
            and len(set(names)) == len(names)
            and self.required <= set(names) <= self.names
        )
        if len(self.forms) >= FORMS:
            return None
        # A number of its own: the forms of all ops share one table.
        made = form(next(_numbers), names, self.tensors) if right else None
        return self.forms.setdefault((count, *keywords) if keywords else count, made)

    def learn(
        self,
        memory: _Memory,
        form: Form,
        key: Hashable,
        values: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take the release's path; remember where it led."""
        from .launches import Prepared, Unrepeatable, prepare
        from .signature import refusal

        tuning = memory.tuning(self.home)
        index = self._index(memory.state, form, values)
        why = None
        if index is None:
            why = "tensors of several devices, or none"
        elif self._reads_the_last_call(form, values, kwargs):
            why = "skip_check with a backend chosen by an earlier call"
        else:
            why = refusal(form, values)
        if index is None or why is not None:
            memory.refusals[str(why)] += 1
            # Not remembered: the key may have the caller's objects in it.
            return self.release(*args, **kwargs)
        if memory.stream(index) is None or not (tuning.meet() and tuning.steady()):
            return self.release(*args, **kwargs)
        generation = memory.generation
        told_apart = _told_apart(form, values)
        if told_apart is None:
            return self.release(*args, **kwargs)
        memory.misses += 1
        count, notes = len(args), Notes()
        named = dict(zip(kwargs, told_apart[count:], strict=True))
        result = noted(notes, lambda: self.release(*told_apart[:count], **named))
        made = None
        try:
            made = prepare(memory.state, notes, form, told_apart, result)
        except Unrepeatable as error:
            memory.refusals[str(error)] += 1
        except Exception as error:
            # The op has run; that it cannot be described is no error of its caller.
            memory.refusals[f"unexpected {type(error).__name__}"] += 1
            if memory.state.first_time("unexpected launch"):
                log.warning(
                    "A launch of %s could not be described, so each call takes the release's path.",
                    getattr(self.release, "__name__", "an op"),
                    exc_info=True,
                )
        if made is not None and memory.must_not_serve(made.plan):
            held = made.plan in memory.state.held
            why = "a plan that a live graph holds" if held else "too many plans were built"
            memory.refusals[why] += 1
            made = Prepared(None, None, made.plan)
        if notes.spoilt is None:  # else it may go better the next time
            memory.add(_Known(key, index, tuning, made), generation)
        return result

    def _index(self, state: State, form: Form, values: tuple[Any, ...]) -> int | None:
        devices = {values[i].device for i in form.tensors if values[i] is not None}
        return state.device.index_of(devices.pop()) if len(devices) == 1 else None

    def _reads_the_last_call(
        self, form: Form, values: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """With ``skip_check`` the release looks for ``backend="auto"`` among the keywords only;
        given otherwise, it runs the backends that it found in an earlier call."""
        given = dict(zip(form.names, values, strict=True))
        backend = given.get("backend", self.defaults.get("backend"))
        return bool(given.get("skip_check")) and backend == "auto" and "backend" not in kwargs


_numbers = itertools.count()


def _told_apart(form: Form, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """``values`` with no tensor twice, so that each operand of a launch is one argument: a tensor
    that comes again (one scale for both operands) is replaced by an alias. ``None`` if the output
    comes again: the op returns that very object."""
    seen: dict[int, str] = {}
    apart = list(values)
    for i in form.tensors:
        value, name = values[i], form.names[i]
        if value is None:
            continue
        if id(value) in seen:
            if "out" in (name, seen[id(value)]):
                return None
            apart[i] = value.detach()
        seen.setdefault(id(value), name)
    return tuple(apart)


def prepared_launches(release: F) -> F:
    """Decorates a public op, outermost: a call of a signature seen before launches at once.

    The result has the name, signature, documentation and attributes of ``release``, now and
    later: the releases set attributes on their functions at each call and read them from the
    public name. Where the release logs every call, ``release`` itself is returned.
    """
    original = inspect.unwrap(release)
    if _logs_calls() or "AutoTuner" not in original.__globals__:
        return release
    op = _Op(release, original)
    forms, fasts = op.forms, op.fast

    def call(*args: Any, **kwargs: Any) -> Any:
        # First of all: Dynamo, which follows this code, then sees the release's function alone.
        if _dynamo_tracing():
            return release(*args, **kwargs)
        memory = _memory
        if memory is None or memory.state is not _state.current:
            memory = _current_memory()
        if not memory.enabled or _modes_active() or _functions_active():
            return release(*args, **kwargs)
        if captures.registry.dead:
            # Calls that are served from memory have no slower step to let go of a graph in.
            collect(everything=False, unpin=False)
        way = (len(args), *kwargs) if kwargs else len(args)
        values = (*args, *kwargs.values()) if kwargs else args
        fast = fasts.get(way)
        if (
            fast is not None
            and fast[0] is memory
            and fast[1] == memory.generation
            and fast[4].steady()
        ):
            try:
                result = fast[2](*values)
            except TypeError:  # an argument that is no key; the release says what is wrong
                pass
            except Exception:
                # The launch failed: the Python way, which fails as well or not.
                fasts.pop(way, None)
                memory.failures += 1
            else:
                if result is not None:
                    return result
        try:
            form = forms[way]
        except KeyError:
            form = op.form(len(args), tuple(kwargs))
        if form is None:
            return release(*args, **kwargs)
        try:
            brief, unaligned, addresses = form.brief(*values)
            quick = memory.quick.get(brief)
            if (
                quick is None
                or unaligned
                or quick.known.gone
                or not quick.alike(*quick.pick(values))
                or (quick.twice and not _same(values, quick.twice))
            ):
                key, known = memory.find(form, brief, unaligned, values)
            else:
                known = quick.known
        except (AttributeError, RuntimeError, TypeError):  # the release says what is wrong
            return release(*args, **kwargs)
        if known is None:
            return op.learn(memory, form, key, values, args, kwargs)
        launch = known.call
        if launch is None:
            if known.plan is None or memory.must_not_serve(known.plan):
                return release(*args, **kwargs)
            return op.learn(memory, form, known.key, values, args, kwargs)  # its graphs are gone
        stream = memory.stream(known.index)
        if stream is None:
            return release(*args, **kwargs)
        if not known.tuning.steady():
            return op.learn(memory, form, known.key, values, args, kwargs)
        try:
            result = launch(values, addresses, stream)
        except Exception:
            # The plan is gone, or the launch failed: the release's path knows what to do.
            memory.drop(known)
        else:
            known.hits += 1
            if known.native is not None:
                known.native.use(stream)
            elif known.source is not None and known.hits >= known.source.after:
                memory.hand_over(op, way, form, known, values)
            return result
        return release(*args, **kwargs)

    functools.update_wrapper(call, release)
    if "__wrapped__" in release.__dict__:
        # One dict for both: what the release sets on its function is to be seen on this one.
        call.__dict__ = release.__dict__
    return cast(F, call)


def _same(values: tuple[Any, ...], twice: tuple[tuple[int, int], ...]) -> bool:
    return all(values[i] is values[j] for i, j in twice)


def _logs_calls() -> bool:
    """Whether the release was told, before it was imported, to log or dump every call."""
    return bool(getattr(sys.modules.get("flashinfer.api_logging"), "_API_LOG_LEVEL", 0))
