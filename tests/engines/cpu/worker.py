"""The worker of vLLM's CPU platform without what it does for speed: binding to cores, compiling."""

from __future__ import annotations

import os
from typing import Any

import torch
import vllm.utils.cpu_resource_utils  # noqa: F401  the worker's module needs it to be there first
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment

CACHE_BYTES = 64 << 20


class CpuWorker(CPUWorker):  # type: ignore[misc]
    """A worker with vLLM's own model runners for the CPU, which descend from those for GPUs."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        Worker.__init__(self, *arguments, **named)
        self.profiler = None
        self.parallel_config.disable_custom_all_reduce = True

    def init_device(self) -> None:
        """Set up one process's groups and the model runner."""
        self.device = torch.device("cpu")
        os.environ["VLLM_DIST_IDENT"] = self.distributed_init_method.split(":")[-1]
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner
        else:
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner
        self.model_runner = CPUModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Warm up, then leave a small cache: sequences of the tests fit."""
        self.model_runner.warming_up_model()
        return CACHE_BYTES
