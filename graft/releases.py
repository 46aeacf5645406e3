"""The known releases of flashinfer-python: their hashes, and what each edit finds in them.

Every wheel below was downloaded from PyPI and read. A count is the number of sites of one edit in
one file; any other number stops the build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

DISTRIBUTION = "flashinfer-python"
DEFAULT_BASE = "0.6.16.post3"
#: The first release with the defect; older ones have another shape and are not supported.
FIRST_AFFECTED = Version("0.6.12")

Counts = Mapping[str, Mapping[str, int]]

_GEMM = "flashinfer/gemm/gemm_base.py"
_BF16_FP4 = "flashinfer/gemm/gemm_bf16_fp4_cudnn.py"
_BF16_FP4_DSL = "flashinfer/gemm/gemm_bf16_fp4_cute_dsl.py"
_SVDQUANT = "flashinfer/gemm/gemm_svdquant.py"
_GROUPED = "flashinfer/grouped_mm/cudnn/core.py"
_LOW_LATENCY = "flashinfer/trtllm_low_latency_gemm.py"
_UTILS = "flashinfer/utils.py"
_TUNER_MODULE = "flashinfer/autotuner.py"
_TUNER = "flashinfer/autotuner/autotuner.py"


@dataclass(frozen=True)
class Family:
    """Releases in which every edit finds the same sites."""

    #: Expected number of sites: edit name -> path in the wheel -> count.
    counts: Counts
    #: Workspace names whose length is part of the autotuner's key and is 32 MiB in the release.
    #: They keep that length (another one voids tuned cache files); 40 MiB are mapped behind it.
    own_lengths: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Release:
    """One upstream wheel."""

    version: str
    state: str
    family: Family
    #: Of the wheel file.
    sha256: str
    #: Over the sorted ``path,hash`` rows of its RECORD (see :func:`graft.record.digest`).
    record_sha256: str


_BF16 = frozenset({"mm_bf16_workspace", "bmm_bf16_workspace"})
_MXFP8 = frozenset({"mm_mxfp8_workspace", "bmm_mxfp8_workspace"})
_FP4_FP8 = frozenset({"mm_fp4_workspace", "bmm_fp8_workspace"})
_BF16_FP4_NAME = frozenset({"mm_bf16_fp4_workspace"})


def _counts(
    *,
    grow: int,
    bf16_fp4: bool = True,
    default: tuple[str, ...],
    lanes: int,
    lanes_dsl: int = 0,
    lanes_svdquant: int = 0,
    lanes_more: Mapping[str, int] | None = None,
    getters: int = 1,
    builds: int = 9,
    retries: bool = False,
    executes: int = 8,
    executes_grouped: int = 3,
    gate: int,
    prepared: int = 27,
    tuner: str = _TUNER,
) -> Counts:
    two = {_BF16_FP4: 2} if bf16_fp4 else {}
    lane_files = {
        _GEMM: lanes,
        _BF16_FP4: int(bf16_fp4),
        _BF16_FP4_DSL: lanes_dsl,
        _SVDQUANT: lanes_svdquant,
        _GROUPED: 3,
        _LOW_LATENCY: 1,
        **(lanes_more or {}),
    }
    return {
        "grow-sites": {_GEMM: grow, **(two if grow == 8 else {})},
        "default-size": dict.fromkeys(default, 1),
        "gemm-buffers": {path: n for path, n in lane_files.items() if n},
        "cache-buffers": {_UTILS: getters},
        "plan-builds": {_GEMM: builds, **two, _GROUPED: 3},
        "retries": {_GEMM: 5, _BF16_FP4: 1} if retries else {},
        "plan-lifetime": {_GEMM: executes, **two, _GROUPED: executes_grouped},
        "sm12x-gate": {_GEMM: gate},
        "prepared-launches": {_GEMM: prepared, tuner: 1},
    }


#: 0.6.12 has the length of every tuned op's workspace in the autotuner's key.
_F0612 = Family(
    _counts(
        grow=8,
        bf16_fp4=False,
        default=(_GEMM,),
        lanes=13,
        gate=2,
        prepared=23,
        tuner=_TUNER_MODULE,
    ),
    _BF16 | _MXFP8 | _FP4_FP8,
)
_F0613 = Family(_F0612.counts, _BF16 | _MXFP8)
_F0614 = Family(
    _counts(grow=8, default=(_GEMM,), lanes=13, gate=2, prepared=23, tuner=_TUNER_MODULE),
    _BF16 | _MXFP8 | _BF16_FP4_NAME,
)
#: From 0.6.15 on the autotuner is a package.
_F0615 = Family(
    _counts(grow=8, default=(_GEMM,), lanes=13, gate=2, prepared=23), _F0614.own_lengths
)
_F0616 = Family(
    _counts(
        grow=8,
        default=(_GEMM, _SVDQUANT),
        lanes=13,
        lanes_svdquant=1,
        retries=True,
        gate=2,
    ),
    _F0614.own_lengths,
)
_F0618 = Family(
    _counts(
        grow=8,
        default=(_GEMM, _SVDQUANT),
        lanes=13,
        lanes_dsl=4,
        lanes_svdquant=1,
        retries=True,
        gate=3,
    ),
    _F0614.own_lengths,
)
#: From 0.7.0 on the release's own length is 40 MiB, and most edits replace upstream's version.
_F0700 = Family(
    _counts(
        grow=3,
        default=(_SVDQUANT,),
        lanes=15,
        lanes_dsl=4,
        lanes_svdquant=2,
        builds=11,
        gate=3,
    )
)
_F0702 = Family(
    _counts(
        grow=3,
        default=(_SVDQUANT,),
        lanes=15,
        lanes_dsl=4,
        lanes_svdquant=2,
        builds=11,
        executes=9,
        gate=3,
    )
)
_F0702P1 = Family(
    _counts(
        grow=3,
        default=(_SVDQUANT,),
        lanes=16,
        lanes_dsl=4,
        lanes_svdquant=2,
        builds=11,
        executes=9,
        gate=3,
    )
)
_F0704 = Family(
    _counts(
        grow=3,
        default=(_SVDQUANT,),
        lanes=16,
        lanes_dsl=4,
        lanes_svdquant=2,
        lanes_more={
            "flashinfer/gemm/svdquant_sm120_auto.py": 1,
            "flashinfer/gemm/svdquant_sm120_cutlass.py": 2,
        },
        getters=2,
        builds=11,
        executes=9,
        executes_grouped=5,
        gate=3,
    )
)
FAMILIES = (_F0612, _F0613, _F0614, _F0615, _F0616, _F0618, _F0700, _F0702, _F0702P1, _F0704)

_AFFECTED = "affected: resize_() moves the workspace"
_GATED = "affected: resize_() moves the workspace; SM12x gate present"
_FIXED = "workspace no longer moves; plans of captured graphs are not kept"
_RETAINS = "workspace no longer moves; plans of captured graphs are kept for ever"
_STREAMS = "as 0.7.2, and a workspace per stream"

RELEASES: dict[str, Release] = {
    version: Release(version, state, family, sha256, record)
    for version, state, family, sha256, record in (
        (
            "0.6.12",
            _AFFECTED,
            _F0612,
            "0c7a01e586b4796810d974cbf13a9c0eb2ade6a94d12e3220cf7782a1c09b8d3",
            "889199aecb251958f074aed62f59df4a2bc5a95f7116cb40dae65cca4a9d62c0",
        ),
        (
            "0.6.13",
            _AFFECTED,
            _F0613,
            "239e6ddc3cbbaf0bee251861a8c7c69438b1171830d69ddfa133ddea4494850d",
            "ea1cf028f5b15794b435d926f5a3abe11b3dc1a67520da43332b3918810d5535",
        ),
        (
            "0.6.14",
            _AFFECTED,
            _F0614,
            "d124369346a3d48eac67e31c42f7a3c813bcc0abc10e2e36db413b7b3dfd97df",
            "6e84164c117c3db732e2ee4b4a63c539488dd306c9aa714a8767a76581d45185",
        ),
        (
            "0.6.15",
            _AFFECTED,
            _F0615,
            "da6c339e14db4831ade0d593324f02907d44bd4b86b640faad4727d9e089477b",
            "0540d92493042070c9c585d7cc0d6567d68ae85df827d364a8ec481e93ba6980",
        ),
        (
            "0.6.15.post1",
            _AFFECTED,
            _F0615,
            "f2419fd2b77c2705816e8d0a31c784c6456b17f373f8494b5cfc3bdf434d5c44",
            "bf7cae706c2f43f43f301db9d32a0721b7b663e18f4f894719443a254becbccd",
        ),
        (
            "0.6.16",
            _AFFECTED,
            _F0616,
            "059d629cf352dae2d2e17c9b632f1be7c12fd7feb4979d71cdffd96104219e53",
            "b31cf0ca27bb94c556ba5c48632d49149e9946a37919c564df097cc727fbfad5",
        ),
        (
            "0.6.16.post1",
            _AFFECTED,
            _F0616,
            "f049556fe64f1a16dfd2acc5b75640c732713b385cd3fbe46c57f68a52fef841",
            "bafd80445dbb9113083013cc481c796148771d15adfb0cd55dd1e66506692e93",
        ),
        (
            "0.6.16.post2",
            _AFFECTED,
            _F0616,
            "bee5eccf019d721ba8caa57dce7325dc2dfdd7fd5bf5e6424fdc611c4f2d94c2",
            "88f65a67fe10b574cc61774caf18625f55352f3218cb33b8bf9cf025c6ae1161",
        ),
        (
            "0.6.16.post3",
            _AFFECTED,
            _F0616,
            "caf686b9b079abe1c9d65ab505698bd325e8072de40afd822f2c74f2ac3bc601",
            "ba6703da49ff2a13214069cd3d69fe97ebfe89e36d0e36ce6c9babf2e37c3616",
        ),
        (
            "0.6.16.post4",
            _AFFECTED,
            _F0616,
            "31c2d94a36bb7309ff584ddd3a164bb5470f6a5c2b738a2879f686df2c05adb8",
            "a64184e4ad2a46c1a6d4e13518e2883dc2d4fcb0e49b1636106d653e9cb470d3",
        ),
        (
            "0.6.17",
            _AFFECTED,
            _F0616,
            "ab7ce3aec42faf2f6079aa840c2407ac00ecd277a0524cdb708a8ff4a64dad90",
            "7a9e1647d7a6d35df2a02df18c2855fb7d554b8bc643dedba23913e15474fe12",
        ),
        (
            "0.6.18",
            _GATED,
            _F0618,
            "d5d26edb48f8def0bf28b2c94415aef7f0754e2cd9e3cb3d6e7081262d068aad",
            "c7a56398dc2a99ff22f389661d3d4e5215b4f4459f8dcaa0b20d932b97cf10d0",
        ),
        (
            "0.6.18.post1",
            _GATED,
            _F0618,
            "adb6d2952b47131138e108bd2999b1fe18b71f1a4c0b2684f168753db9563991",
            "03abd50419bdd5db9c7ca0901569f5d4d2f666245c777f417c2158d8b6437f67",
        ),
        (
            "0.7.0",
            _FIXED,
            _F0700,
            "11e564820cde80ec13d351b68fc44cb54a537268bca135204abafc5fadd50240",
            "0c087129726e566156affe3e129fed3869aff825d4f4dc81ac600f0d181ee3ed",
        ),
        (
            "0.7.0.post1",
            _FIXED,
            _F0700,
            "c7adf826568d61fc1b7d3aadd4cae387a35a138bfc08e2deca2f34ecfa280716",
            "360021e71f216d43dd393ec00b88fe8a0ade67ef31d624e1272d3ca9f976b9be",
        ),
        (
            "0.7.1",
            _FIXED,
            _F0700,
            "69302ed6e91314a85a4392324becc194594a782ba181646d25d5c305e1b7e8c4",
            "a9155abfbd8512890efd9a401122242c8c77b14acdfde51cbc526cbb4e85e9a5",
        ),
        (
            "0.7.2",
            _RETAINS,
            _F0702,
            "770550a0aa92b2f10e6c9a1f048dd43713f0f3bb6a12710186fcf8e4e9c99bd8",
            "4338e11295e630fe3d816f1d86e90f2e6516ec3bca6dda3c86525305d8b2c78b",
        ),
        (
            "0.7.2.post1",
            _RETAINS,
            _F0702P1,
            "bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49",
            "ef499575a2591937877ab2d3f8ed527a879e165e1b6eac9bf752605bee030321",
        ),
        (
            "0.7.4",
            _STREAMS,
            _F0704,
            "a051a62e09a2738e8b0de47a1944fd2f0f3eff01b728b662141ea660cb09dd32",
            "4cdf1de74210c45bc0a894fe89b30c973b91598e31f8f53de7350e0ceb055b25",
        ),
    )
}


def state_of(version: str) -> str:
    """Say in words where a version stands; for versions that are not in the table too."""
    if version in RELEASES:
        return RELEASES[version].state
    if Version(version) < FIRST_AFFECTED:
        return "older shape: workspaces are allocated per call; not affected by resize_()"
    return "unknown"
