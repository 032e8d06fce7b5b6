"""cuDNN's sparse attention, which two operations have as a peer."""

from __future__ import annotations

from typing import Any

from ..core.errors import BenchError


def load() -> tuple[Any, Any]:
    """Imports torch and the namespace of its calls."""
    try:
        import torch
        from cudnn.deepseek_sparse_attention import DSA
    except ImportError as error:
        raise BenchError(
            f"peer 'cudnn' needs PyTorch, nvidia-cudnn-frontend and nvidia-cutlass-dsl: {error}"
        ) from error
    return torch, DSA
