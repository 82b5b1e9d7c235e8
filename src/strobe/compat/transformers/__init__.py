"""Run transformers models on strobe: call `register()` once, then use attn_implementation="strobe".

Read `attention` first: it runs in each layer. `layer_mask` holds the mask description that a layer gets. `masks`
computes it once per forward.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ...errors import describe
from .context import context_parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NAME = "strobe"  # must not contain "flash": transformers looks such names up elsewhere
BATCHING_NAME = "strobe_like_flash"  # must contain "flash": only such names get continuous batching without dense masks
OLDEST = (5, 23)  # the oldest transformers version with this interface


def register() -> None:
    """Register strobe in transformers as attn_implementation="strobe". A second call changes nothing.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2)
    >>> config = LlamaConfig(**sizes, num_hidden_layers=1)
    >>> register()
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="strobe")
    >>> model(torch.zeros(1, 5, dtype=torch.long)).logits.shape
    torch.Size([1, 5, 64])

    docs/transformers.md lists the supported features and the differences from "sdpa" and "eager". Raises ImportError if
    transformers is missing or too old.

    Some models do not use transformers' AttentionInterface: for example bloom, falcon, gpt_neo, mpt, roformer, wavlm
    and xglm. Such a model with attn_implementation="strobe" keeps "eager", and a UserWarning names the model.
    """
    _check_version()
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from .attention import attention
    from .masks import mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    _name_those_that_never_ask(PreTrainedModel)
    AttentionInterface.register(BATCHING_NAME, attention)  # no mask function: continuous batching passes offsets


def _name_those_that_never_ask(base: type[PreTrainedModel]) -> None:
    """Patch `get_correct_attn_implementation`, so that models that do not use AttentionInterface keep "eager" and warn.

    transformers' method accepts every registered name for every model. A model that does not look the name up would use
    strobe's mask as additive scores, or look for a layer class of that name.
    """
    checked = base.get_correct_attn_implementation
    if hasattr(checked, "__wrapped__"):
        return

    @wraps(checked)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *rest: Any, **more: Any
    ) -> str:
        found = checked(self, requested_attention, *rest, **more)
        if found != NAME or _asks(type(self)):
            return found
        name = type(self).__name__
        remedy = (
            f"{name} never asks transformers' AttentionInterface, so its own attention runs; make it with "
            '"eager", or with "sdpa" where it has that'
        )
        warnings.warn(
            describe("attn_implementation", f'"{NAME}" for {name}', '"eager", which it keeps', remedy),
            UserWarning,
            stacklevel=2,
        )
        return "eager"

    base.get_correct_attn_implementation = get_correct_attn_implementation


def _asks(model: type[PreTrainedModel]) -> bool:
    """Whether a model class looks up attention functions by name. As in transformers, the test reads the source of its
    module.
    """
    if model._can_set_attn_implementation():
        return True
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):  # no source (a notebook, compiled code): assume that it does
        return True


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[None]:
    """Run `model.generate_batch` and related methods on strobe within the `with` block.

    >>> with continuous_batching(model):  # doctest: +SKIP
    ...     outputs = model.generate_batch(inputs)

    Continuous batching in transformers accepts its own attention functions and names that contain "flash".
    `set_attn_implementation` looks the latter up elsewhere. So this sets BATCHING_NAME in the model's config directly
    and restores the config at the end of the block.

    Steps in which each request has one new token run over pages, on every device and with windows.
    max_blocks_per_request=0 in the ContinuousBatchingConfig turns that off, and keys are gathered in each step.
    """
    register()
    from .paged import decode_over_pages

    before = _implementations(model.config)
    model.config._attn_implementation = BATCHING_NAME
    try:
        with decode_over_pages(BATCHING_NAME):
            yield
    finally:
        model.config._attn_implementation = before


def _implementations(config: PretrainedConfig) -> Any:
    """The attn_implementation of a config and of its sub-configs, as a nested dict that `_attn_implementation`
    accepts."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    return {
        "": config._attn_implementation,
        **{key: _implementations(part) for key, part in parts.items() if part is not None},
    }


def _check_version() -> None:
    wanted = ".".join(map(str, OLDEST))
    remedy = f"pip install 'transformers>={wanted},<6'"
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise ImportError(describe("transformers", "none", f"{wanted} or later", remedy)) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ImportError(describe("transformers", found, f"{wanted} or later", remedy))


__all__ = ["context_parallel", "continuous_batching", "register"]
