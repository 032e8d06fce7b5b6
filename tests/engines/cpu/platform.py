"""A platform of vLLM that computes on the CPU and answers as an H200 where attention backends are chosen."""

from __future__ import annotations

from typing import Any

import torch

WORKER = "tests.engines.cpu.worker.CpuWorker"
HOPPER = (9, 0)
MULTIPROCESSORS = 132


def without_pinned_memory() -> None:
    """Pinned memory needs a GPU: leave it out where vLLM asks for it."""

    def leaving_out(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            named.pop("pin_memory", None)
            return function(*arguments, **named)

        return call

    for name in ("empty", "zeros", "tensor", "full", "ones", "empty_like", "zeros_like"):
        setattr(torch, name, leaving_out(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]


def install() -> None:
    """Put the platform in the place of the one that vLLM would find."""
    import vllm.platforms
    import vllm.platforms.cuda as real
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability, Platform

    chosen = real.CudaPlatformBase

    class CpuAsHopper(CpuPlatform):  # type: ignore[misc]
        """A platform that leaves the choices by these three to vLLM's own code for CUDA."""

        get_attn_backend_cls = classmethod(chosen.get_attn_backend_cls.__func__)
        get_valid_backends = classmethod(chosen.get_valid_backends.__func__)
        update_block_size_for_backend = classmethod(Platform.update_block_size_for_backend.__func__)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*HOPPER)

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return MULTIPROCESSORS

        @classmethod
        def check_and_update_config(cls, config: Any) -> None:
            """Keep what the CPU's platform would change: chunks of prompts, cached prefixes, the size of pages."""
            scheduler, cache = config.scheduler_config, config.cache_config
            chunks = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
            page_size, cached = cache.block_size, cache.enable_prefix_caching
            super().check_and_update_config(config)
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks
            cache.block_size, cache.enable_prefix_caching = page_size, cached
            config.parallel_config.worker_cls = WORKER
            config.parallel_config.distributed_executor_backend = "uni"

    vllm.platforms._current_platform = CpuAsHopper()
    import vllm.utils.torch_utils as utilities

    utilities.PIN_MEMORY = False
