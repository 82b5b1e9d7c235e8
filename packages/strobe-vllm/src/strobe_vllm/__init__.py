"""vLLM's attention on strobe. vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations

__version__ = "0.2.0"


def register() -> None:
    """Register strobe as vLLM's backend CUSTOM: `vllm serve MODEL --attention-backend CUSTOM`. A second call changes
    nothing.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "strobe_vllm.backend.StrobeAttentionBackend")
