"""What this machine and this wheel have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Plain data; ``cudnn`` is the backend's version number, 0 where there is none."""

    distribution: str
    version: str
    fork: bool
    data: bool
    gpu: str
    gpus: int
    capability: tuple[int, int]
    memory: int
    driver: str
    torch: str
    cuda: str
    cudnn: int
    cudnn_missing: str
    cudnn_frontend: str
    cuda_bindings: str
    override_shape: bool
    python: str

    @property
    def era(self) -> str:
        """``fork``; ``0.6``: releases whose workspace moves; ``0.7``: releases with the fix."""
        if self.fork:
            return "fork"
        numbers = [int(part) for part in self.version.split(".")[:2] if part.isdigit()]
        return "0.6" if numbers < [0, 7] else "0.7"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "era": self.era}


class NoDevice(Exception):
    """There is no CUDA device to run on."""


def gather() -> Facts:
    """Ask torch, FlashInfer and cuDNN. Initialises CUDA. Raises NoDevice."""
    import importlib.metadata
    import importlib.util
    import platform
    from pathlib import Path

    import torch

    if not torch.cuda.is_available():
        raise NoDevice(f"torch {torch.__version__} sees no CUDA device")
    import flashinfer

    home = Path(flashinfer.__file__).parent
    gemm_base: Any = importlib.import_module("flashinfer.gemm.gemm_base")
    cudnn_version, missing, frontend = 0, "", ""
    try:
        import cudnn

        cudnn_version, frontend = int(cudnn.backend_version()), str(cudnn.__version__)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        missing = f"{type(error).__name__}: {error}"
    offers = getattr(
        gemm_base,
        "_is_cudnn_override_shape_available",
        getattr(gemm_base, "is_cudnn_override_shape_available", lambda: False),
    )
    properties = torch.cuda.get_device_properties(0)

    def installed(*names: str) -> str:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return ""

    return Facts(
        distribution=installed("flashinfer-python"),
        version=str(flashinfer.__version__),
        fork=importlib.util.find_spec("flashinfer.gemm_workspace") is not None,
        data=(home / "data" / "csrc").is_dir(),
        gpu=properties.name,
        gpus=torch.cuda.device_count(),
        capability=torch.cuda.get_device_capability(0),
        memory=properties.total_memory,
        driver=_driver(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        cudnn=cudnn_version,
        cudnn_missing=missing,
        cudnn_frontend=frontend,
        cuda_bindings=installed("cuda-bindings", "cuda-python"),
        override_shape=bool(cudnn_version and offers()),
        python=platform.python_version(),
    )


def _driver() -> str:
    """Version of the kernel driver, empty where it cannot be read."""
    from pathlib import Path

    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        words = []
    for word in words:
        parts = word.split(".")
        if len(parts) >= 2 and all(part.isdigit() for part in parts):
            return word
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return ""
