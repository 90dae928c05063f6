"""SGLang: ``--load-format penstock``.

SGLang finds `register` by an entry point and calls it in every process. Hooks around SGLang's default loader give its
models deferred tensors, at start-up and in ``update_weights_from_disk``.
"""

from __future__ import annotations

import logging
from typing import Any

FORMAT = "penstock"

_logger = logging.getLogger("penstock")
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_CONFIG = "sglang.srt.configs.load_config.LoadConfig"


def register() -> None:
    """Makes the load format ``penstock`` known to SGLang. May be called repeatedly.

    If SGLang's interface has changed too much, one line is logged, and the format is not there.
    """
    try:
        from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _logger.warning("penstock: this SGLang takes no load formats of plugins (%s)", error)
        return
    if FORMAT in LOAD_FORMAT_CHOICES:
        return
    add_load_format_choices([FORMAT])
    for target, hook in (
        (f"{_CONFIG}._verify_load_format", _verified),
        (f"{_LOADER}._prepare_weights", _prepared),
        (f"{_LOADER}._get_weights_iterator", _iterated),
        (f"{_LOADER}.load_weights_only", _loaded),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


# The hooks import what they need: torch is there when they are called.


def _verified(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(config.load_format, str) and config.load_format.lower() == FORMAT:
        from ._sglang_loader import claim

        claim(config)
    return original(config, *args, **kwargs)


def _prepared(original: Any, loader: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    settings = getattr(loader.load_config, "penstock", None)
    return original(loader, model if settings is None or settings[1] is None else settings[1], *args, **kwargs)


def _iterated(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    settings = getattr(loader.load_config, "penstock", None)
    if settings is None:
        return original(loader, *args, **kwargs)
    from ._sglang_loader import iterated

    return iterated(original, loader, settings[0], *args, **kwargs)


def _loaded(original: Any, model: Any, weights: Any, target_device: Any) -> Any:
    import sys

    loader = sys.modules.get(f"{__package__}._sglang_loader")
    if loader is None:  # no configuration of this process has asked for the format
        return original(model, weights, target_device)
    return loader.loaded(original, model, weights, target_device)
