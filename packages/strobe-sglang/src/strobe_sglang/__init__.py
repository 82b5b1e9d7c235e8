"""SGLang's attention on strobe. SGLang calls `register` in each of its processes (entry point `sglang.srt.plugins`)."""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"
NAME = "strobe"


def register() -> None:
    """Register the backend of `python -m sglang.launch_server --attention-backend strobe`. A second call changes
    nothing.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(create)
    for names, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
    ):
        if NAME not in names:
            add([NAME])


def create(runner: Any) -> Any:
    """The backend of one model runner."""
    from .backend import StrobeAttnBackend

    return StrobeAttnBackend(runner)
