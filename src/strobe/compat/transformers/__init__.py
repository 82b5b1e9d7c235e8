"""transformers models on strobe: `register()` once, then attn_implementation="strobe".

Read `attention` first (what runs in each layer), then `layer_mask` (what it is told) and `masks` (who finds that out, once a forward).
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import metadata
from typing import Any

from ...errors import describe

NAME = "strobe"  # transformers looks a name that holds "flash" up elsewhere
BATCHING_NAME = "strobe_like_flash"  # but batches continuously, without dense masks, only for a name that holds it
OLDEST = (5, 23)  # whose interface this is


def register() -> None:
    """Make strobe known to transformers as attn_implementation="strobe"; calling it again changes nothing.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> register()
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="strobe")
    >>> model(torch.zeros(1, 5, dtype=torch.long)).logits.shape
    torch.Size([1, 5, 64])

    What it serves, and how it differs from "sdpa" and "eager": docs/switching.md. Raises ImportError where transformers is missing or too old.

    Some models never ask transformers' AttentionInterface, such as bloom, falcon, gpt_neo, mpt, roformer, wavlm and xglm. One that is
    made with attn_implementation="strobe" keeps "eager", and a UserWarning names it.
    """
    _check_version()
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from .attention import attention
    from .masks import mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    _name_those_that_never_ask(PreTrainedModel)
    AttentionInterface.register(BATCHING_NAME, attention)  # and no mask function: continuous batching says what is seen by offsets


def _name_those_that_never_ask(base: Any) -> None:
    """transformers checks the name a model is made with by this method, and accepts each that is registered, also for models that never look it
    up: these would read strobe's mask as a matrix of scores, or look for a layer of that name."""
    checked = base.get_correct_attn_implementation
    if hasattr(checked, "__wrapped__"):
        return

    @wraps(checked)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *rest: Any, **more: Any) -> str:
        found = checked(self, requested_attention, *rest, **more)
        if found != NAME or _asks(type(self)):
            return found
        name = type(self).__name__
        remedy = (
            f'{name} never asks transformers\' AttentionInterface, so its own attention runs; make it with "eager", or with "sdpa" where it has that'
        )
        warnings.warn(describe("attn_implementation", f'"{NAME}" for {name}', '"eager", which it keeps', remedy), UserWarning, stacklevel=2)
        return "eager"

    base.get_correct_attn_implementation = get_correct_attn_implementation


def _asks(model: Any) -> bool:
    """Whether the code of a model's class looks attention functions up, told as transformers tells it: by its source."""
    if model._can_set_attn_implementation():
        return True
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):  # a class of a notebook or of compiled code, which is taken at its word
        return True


@contextmanager
def continuous_batching(model: Any) -> Iterator[None]:
    """Within it `model.generate_batch` and its relatives run on strobe.

    >>> with continuous_batching(model):  # doctest: +SKIP
    ...     outputs = model.generate_batch(inputs)

    transformers admits to continuous batching its own attention functions and those with "flash" in their names, which
    `set_attn_implementation` would look up elsewhere. So the model's config holds such a name while this lasts, and then its own again.
    """
    register()
    before = _implementations(model.config)
    model.config._attn_implementation = BATCHING_NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _implementations(config: Any) -> dict[str, Any]:
    """What a config and the configs of its parts have, in the form that can be set."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    return {"": config._attn_implementation, **{key: _implementations(part) for key, part in parts.items() if part is not None}}


def _check_version() -> None:
    wanted = ".".join(map(str, OLDEST))
    remedy = f"pip install 'transformers>={wanted},<6'"
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise ImportError(describe("transformers", "none", f"{wanted} or later", remedy)) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ImportError(describe("transformers", found, f"{wanted} or later", remedy))


__all__ = ["continuous_batching", "register"]
