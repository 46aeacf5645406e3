"""What is known of an environment: plain data, each piece there or missing with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """A fact that could not be had, and why."""

    reason: str


class Unknown(Exception):
    """Raised where a fact turns out to be missing; its text is the reason."""


def asked(what: Callable[[], T | Missing]) -> T | Missing:
    """``what()``, or that it is missing: no single fact may take the doctor down."""
    try:
        return what()
    except Unknown as reason:
        return Missing(str(reason))
    except Exception as error:
        return Missing(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Package:
    """A distribution by its metadata. ``folder`` is the site-packages that it is in."""

    name: str
    version: str
    folder: str


@dataclass(frozen=True)
class Gpu:
    """One device. ``sm`` is its compute capability."""

    name: str
    sm: tuple[int, int]


@dataclass(frozen=True)
class Fork:
    """What ``graft.json`` beside METADATA says, and whether the files are still as built."""

    label: str
    base: str
    #: edit -> number of sites
    edits: Mapping[str, int]
    #: Files that hold what the release has, so that their edits are gone.
    reverted: tuple[str, ...] = ()
    #: Files that are neither the release's nor the fork's, or not there.
    altered: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return not self.reverted and not self.altered


@dataclass(frozen=True)
class FlashInfer:
    """The copy that an import would find."""

    #: Of the distribution (``0.6.16.post3+ws.1``); its metadata may be missing.
    version: str | Missing
    #: ``flashinfer.__version__``, read from its file.
    own_version: str | Missing
    folder: str
    #: None: a release without the fork.
    fork: Fork | Missing | None
    #: Further copies, and further metadata of this one.
    others: tuple[str, ...] = ()

    @property
    def release(self) -> str | None:
        """The upstream version: without a local label."""
        for version in (self.own_version, self.version):
            if isinstance(version, str):
                return version.partition("+")[0]
        return None


@dataclass(frozen=True)
class Library:
    """A libcudnn on disk. ``version`` is ``major.minor.patch``."""

    path: str
    version: str | Missing


@dataclass(frozen=True)
class JitCache:
    """Compiled ops below ``folder``. ``older``: how many are older than the newest source."""

    folder: str
    compiled: int
    older: int
    nvcc: str | None


_NOT_ASKED = Missing("not asked")


@dataclass(frozen=True)
class Facts:
    """Everything that the judgement looks at."""

    #: The site-packages examined; None: this environment.
    image: str | None = None
    gpus: tuple[Gpu, ...] | Missing = _NOT_ASKED
    driver: str | Missing = _NOT_ASKED
    #: The newest CUDA that the driver can do, ``13.0``.
    driver_cuda: str | Missing = _NOT_ASKED
    flashinfer: FlashInfer | Missing = _NOT_ASKED
    #: None: it imports. Otherwise its error.
    import_error: str | Missing | None = _NOT_ASKED
    torch: str | Missing = _NOT_ASKED
    torch_cuda: str | Missing = _NOT_ASKED
    #: Backend versions as cuDNN counts them (92301 is 9.23.1): the one that FlashInfer gets
    #: through cudnn-frontend, and the one that torch has.
    cudnn: int | Missing = _NOT_ASKED
    cudnn_of_torch: int | Missing = _NOT_ASKED
    #: Paths that are mapped once both are imported.
    cudnn_mapped: tuple[str, ...] | Missing = _NOT_ASKED
    cudnn_found: tuple[Library, ...] | Missing = _NOT_ASKED
    cudnn_frontend: str | Missing = _NOT_ASKED
    cuda_bindings: str | Missing = _NOT_ASKED
    cubin: str | Missing = _NOT_ASKED
    jit_cache: str | Missing = _NOT_ASKED
    jit: JitCache | Missing = _NOT_ASKED
    #: vLLM, SGLang and TensorRT-LLM, those that are there: name -> version.
    engines: Mapping[str, str] | Missing = _NOT_ASKED
    #: Environment variables that matter and are set.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: What the release's autotuner records of this environment; only the keys that are known.
    metadata: Mapping[str, str] | Missing = _NOT_ASKED


def backend_words(version: int) -> str:
    """cuDNN's number in words.

    >>> backend_words(92301), backend_words(91900), backend_words(8907)
    ('9.23.1', '9.19.0', '8.9.7')
    """
    if version < 10000:  # cuDNN 8 and before had a factor of 1000
        return f"{version // 1000}.{version // 100 % 10}.{version % 100}"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def sm_words(sm: tuple[int, int]) -> str:
    """
    >>> sm_words((12, 0))
    'SM120'
    """
    return f"SM{sm[0]}{sm[1]}"
