"""Parcels that carry vLLM or SGLang to a machine with a GPU but without a network: built, never committed.

A parcel is a folder with slices of an archive, their checksum and `setup.sh`, which unpacks them. In it are the
engine's Python, its extensions without code for other GPUs than Hopper, the Python packages that a machine with
PyTorch, transformers and CuPy lacks, this package, and these tests. It is for Python 3.12 and PyTorch 2.11.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.gpu.keep_sm90 import shorten

REPOSITORY = Path(__file__).resolve().parents[3]
VERSION = "0.26.0"
SLICE_BYTES = 58_000_000
PACKAGES = [
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "annotated-types",
    "typing-inspection",
    "cbor2",
    "pyzmq",
    "openai-harmony",
    "openai==3.54.0",
    "httpx2",
    "sniffio",
    "msgspec",
    "pybase64",
    "cachetools",
    "llguidance<1.8",
    "xgrammar==0.2.1",
    "apache-tvm-ffi==0.1.10",
    "fastapi==0.165.0",
    "starlette==1.10.0",
    "opentelemetry-api",
    "partial-json-parser",
    "platformdirs",
    "compressed-tensors",
    "loguru",
]
"""Packages that vLLM imports and such a machine lacks."""
DEEP_GEMM = "third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu"
"""Has the logits of the indexer; compiles its kernels on the machine, by nvcc."""
EXTENSIONS = (
    *("_C_stable_libtorch", "_flashmla_C", "_flashmla_extension_C", "vllm_flash_attn/_vllm_fa3_C"),
    *("cumem_allocator", "spinloop", "fs_io_C", DEEP_GEMM),
)
WITHOUT_DEVICE_CODE = ("cumem_allocator", "spinloop", "fs_io_C", DEEP_GEMM)
MIXTURE = ("_moe_C_stable_libtorch",)
"""Needed by models with experts."""
SGLANG = [
    *("sglang==0.5.17", "sglang-kernel==0.4.5", "flashinfer-python==0.6.15.post1"),
    *("transformers==5.12.1", "tokenizers==0.22.2"),  # newer ones have a model of a name that SGLang registers
    *("pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types", "typing-inspection", "pyzmq", "openai==3.54.0"),
    *("httpx2", "sniffio", "msgspec", "pybase64", "xgrammar==0.2.1", "apache-tvm-ffi==0.1.11", "fastapi==0.165.0"),
    *("starlette==1.10.0", "opentelemetry-api", "partial-json-parser", "platformdirs", "compressed-tensors==0.17.0"),
    *("loguru", "orjson", "ipython", "traitlets", "dill", "uvicorn", "setproctitle", "gguf"),
]
SGLANG_LEFT_OUT = (
    *("sgl_kernel/flash_ops.abi3.so", "sgl_kernel/infllm_ops*", "sgl_kernel/sm100/*"),
    *("sglang/multimodal_gen/*", "sglang/test/*"),
)
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 34, 31, 28, 27, 26, 24, 17)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def run(*command: Any, **options: Any) -> None:
    """Run a command, shown."""
    print("+", " ".join(map(str, command))[:160], flush=True)
    subprocess.run([str(x) for x in command], check=True, **options)


def download(folder: Path) -> None:
    """Fetch the wheels with pip."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"vllm-{VERSION}-*.whl")):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"vllm=={VERSION}")
    download_packages(folder, PACKAGES)


def download_packages(folder: Path, packages: list[str]) -> None:
    """Fetch wheels for the machine with the GPU, without what they depend on."""
    tags = [x for platform in _PLATFORMS for x in ("--platform", platform)]
    machine = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *tags]
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *machine, *packages)


def kept(name: str, mixture: bool) -> bool:
    """True if an extension is included; `name` is its path in vLLM's package, without its suffixes."""
    return name in EXTENSIONS + (MIXTURE if mixture else ())


def assemble(work: Path, wheels: Path, *, whole: bool, mixture: bool) -> Path:
    """The folder that is to be on the machine's path."""
    raw, site = work / "raw", work / "site"
    for folder in (raw, site):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    engine = next(wheels.glob(f"vllm-{VERSION}-*.whl"))
    run("unzip", "-q", "-o", engine, "-d", raw)
    for wheel in sorted(wheels.glob("*.whl")):
        if wheel != engine and not wheel.name.startswith("mla_cupy"):
            run("unzip", "-q", "-o", wheel, "-d", site)
    drop_what_only_builds(site)
    _thin_out(raw / "vllm", whole=whole, mixture=mixture)
    for name in ("vllm", f"vllm-{VERSION}.dist-info"):
        shutil.move(raw / name, site / name)
    add_ours(work, wheels, site)
    return site


def drop_what_only_builds(site: Path) -> None:
    """Leave out static libraries and xgrammar's symbols: most of its size."""
    for path in site.rglob("*.a"):
        path.unlink()
    for path in (site / "xgrammar").rglob("*.so"):
        run("strip", "--strip-unneeded", path)


def _thin_out(package: Path, *, whole: bool, mixture: bool) -> None:
    for path in list(package.rglob("*.so")):
        name = str(path.relative_to(package)).removesuffix(".so").removesuffix(".abi3")
        if not kept(name, mixture):
            path.unlink()
        elif not whole and name not in WITHOUT_DEVICE_CODE:
            shorten(path)
    (package / "vllm-rs").unlink(missing_ok=True)
    shutil.rmtree(package / "third_party" / "fmha_sm100", ignore_errors=True)


def add_ours(work: Path, wheels: Path, site: Path) -> None:
    """Add this package as it is committed, and these tests."""
    clone = work / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    run("git", "clone", "-q", REPOSITORY, clone)
    for old in wheels.glob("mla_cupy*.whl"):
        old.unlink()
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, clone)
    run("unzip", "-q", "-o", next(wheels.glob("mla_cupy*.whl")), "-d", site)
    (site / "tests").mkdir()
    shutil.copy(clone / "tests" / "__init__.py", site / "tests")
    shutil.copytree(clone / "tests" / "engines", site / "tests" / "engines")
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    (site / "MLA_CUPY_COMMIT").write_text(commit.stdout)


def pack(work: Path, site: Path, out: Path) -> None:
    """Write the slices, each in a folder of its own with what unpacks them."""
    archive = work / "site.tar.xz"
    tar = f"tar -C {work} --sort=name --owner=0 --group=0 --exclude=__pycache__ -c {site.name}"
    run("bash", "-c", f"set -o pipefail; {tar} | xz -9e -T2 > {archive}")
    shutil.rmtree(out, ignore_errors=True)
    slices(archive.read_bytes(), out, SLICE_BYTES)


def slices(data: bytes, out: Path, size: int) -> list[Path]:
    """Cut an archive into folders of at most `size` bytes."""
    digest, count, made = hashlib.sha256(data).hexdigest(), -(-len(data) // size), []
    for number in range(count):
        part = out / f"part{number + 1}"
        part.mkdir(parents=True)
        name = f"slice{number + 1:02d}of{count:02d}"
        (part / name).write_bytes(data[number * size : (number + 1) * size])
        (part / "PARCEL.sha256").write_text(f"{digest}  site.tar.xz\n")
        for script in ("setup.sh", "run.sh"):
            shutil.copy(Path(__file__).with_name(script), part)
        made.append(part)
        print(f"{part}: {sum(x.stat().st_size for x in part.iterdir()) / 1e6:.1f} MB")
    return made


def build_sglang(work: Path, out: Path) -> None:
    """Build the parcel of SGLang in `out`. Its code of FlashAttention, a gigabyte, stays behind: Triton prefills."""
    wheels, site = work / "wheels-sglang", work / "site"
    wheels.mkdir(parents=True, exist_ok=True)
    download_packages(wheels, SGLANG)
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    for wheel in sorted(wheels.glob("*.whl")):
        if not wheel.name.startswith("mla_cupy"):
            run("unzip", "-q", "-o", wheel, "-d", site, "-x", *SGLANG_LEFT_OUT)
    drop_what_only_builds(site)
    for name in ("sm90/common_ops", "flashmla_ops"):
        shorten(site / "sgl_kernel" / f"{name}.abi3.so")
    add_ours(work, wheels, site)
    pack(work, site, out)


def build(work: Path, out: Path, *, whole: bool, mixture: bool) -> None:
    """Build the parcel of vLLM in `out`; `work` keeps the wheels for the next time."""
    download(work / "wheels")
    pack(work, assemble(work, work / "wheels", whole=whole, mixture=mixture), out)
