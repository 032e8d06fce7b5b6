"""The kernels that a call runs on a GPU, and why no others: nothing is computed, and no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mla_cupy.errors import ArgumentError, KernelCompileError, explain
from mla_cupy.kernels.choice import passed_over
from mla_cupy.kernels.gpus import Gpu, described, gpu_of
from mla_cupy.kernels.pipeline import Launch
from mla_cupy.ops.call import callers_names, requested
from mla_cupy.ops.entry import Request
from mla_cupy.ops.operation import Operation
from mla_cupy.runtime import admission, worker
from mla_cupy.runtime import device as devices

__all__ = ["KernelChoice", "which"]

_DEFAULT_ARCH = "sm_90a"


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a call.

    Attributes
    ----------
    kernel, build : str
        Names of the kernel and of its build.
    grid : tuple of int
        Blocks.
    registers, smem_bytes : int or None
        Per thread and per block; None if the build is not compiled yet.
    """

    kernel: str
    build: str
    grid: tuple[int, ...]
    registers: int | None
    smem_bytes: int | None


@dataclass(frozen=True)
class KernelChoice:
    """Result of `which`.

    Attributes
    ----------
    operation, gpu, arch, kernel : str
        Names; `kernel` is the main one.
    has_run : bool
        True if this project has run the kernel on such a GPU. Other kernels are compiled and simulated in the tests.
    launches : tuple of KernelLaunch
        The call's launches, in order.
    passed_over : dict
        The operation's other kernels, each with the reason why it does not run.
    """

    operation: str
    gpu: str
    arch: str
    kernel: str
    has_run: bool
    launches: tuple[KernelLaunch, ...]
    passed_over: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def which(operation: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> KernelChoice:
    """Report which kernels a call runs, and why other kernels do not run. Nothing is allocated, compiled or launched.

    Parameters
    ----------
    operation : function
        `mla_cupy.mla_decode`, `mla_cupy.sparse_mla_forward`, or another operation; or a `functools.partial` of one.
    *args, **kwargs
        The call's own arguments. Their values are not read: `np.empty` of the right shapes is enough.
    arch : str, optional
        Target such as "sm_89". Default: the target of the arrays' GPU, else of this machine's GPU, else "sm_90a".

    Returns
    -------
    KernelChoice

    Raises
    ------
    ArgumentError
        If `operation` is not one, or for any reason that the call itself would raise it.
    UnsupportedDeviceError
        If no kernel runs such a call on the GPU.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> logits = np.empty((64, 4096), np.float32)
    >>> mla_cupy.which(mla_cupy.indexer_topk, logits, 2048, arch="sm_90a").kernel
    'indexer_topk_select'
    """
    found, request = requested(operation, args, kwargs)
    gpu = _gpu(arch, request)
    with callers_names(found):
        return _choice(found, request, gpu)


def _gpu(arch: str | None, request: Request) -> Gpu:
    """The GPU that is asked about."""
    if arch is None:
        ordinal = max(request.device, 0)
        if ordinal < devices.gpu_count():
            return described(devices.describe(ordinal))
    elif arch not in devices.TARGETS:
        raise ArgumentError(explain("arch", repr(arch), "one of " + ", ".join(devices.TARGETS)))
    gpu = gpu_of(arch or _DEFAULT_ARCH)
    return replace(gpu, info=replace(gpu.info, admitted=admission.admitted(gpu.name, gpu.info.arch)))


def _choice(operation: Operation, request: Request, gpu: Gpu) -> KernelChoice:
    config = operation.configure(request, request.problem, request.kernel, gpu.info)
    steps = operation.pipeline.steps(config, request)
    launches = [step for step in steps if isinstance(step, Launch)]
    main = getattr(config, "kernel", None) or (launches[0].kernel if launches else operation.pipeline.kernels[0])
    return KernelChoice(
        operation.name,
        gpu.name,
        gpu.info.arch,
        main.name,
        gpu.has_run(main),
        tuple(_launch(launch, gpu.info.arch) for launch in launches),
        passed_over(operation.pipeline.kernels, request.problem, gpu.info, main.name, request.kernel),
    )


def _launch(launch: Launch, arch: str) -> KernelLaunch:
    registers, smem = _resources(launch, arch)
    grid = tuple(launch.grid)
    return KernelLaunch(launch.kernel.name, str(launch.variant), grid, registers, smem)


def _resources(launch: Launch, arch: str) -> tuple[int | None, int | None]:
    """Registers of a thread and shared memory of a block, if the build is in the cache."""
    try:
        build = worker.cached(launch.kernel.request(launch.variant, arch))
    except KernelCompileError:  # no NVRTC: its version, and so the image, is unknown
        build = None
    return (None, None) if build is None else (build.info["registers"], build.smem_bytes)
