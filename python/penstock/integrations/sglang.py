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

_registered = False


def register() -> None:
    """Makes the load format ``penstock`` known to SGLang. May be called repeatedly.

    If SGLang's interface has changed too much, one line is logged, and the format is not there.
    """
    global _registered
    if _registered:
        return
    try:
        from sglang.srt.arg_groups.choices import add_load_format_choices  # type: ignore[import-not-found]
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]
    except ImportError as error:
        _logger.warning("penstock: this SGLang takes no load formats of plugins (%s)", error)
        return
    _registered = True
    add_load_format_choices([FORMAT])
    for target, hook in (
        (f"{_CONFIG}._verify_load_format", _verified),
        (f"{_CONFIG}.__post_init__", _configured),
        (f"{_LOADER}._get_weights_iterator", _iterated),
        (f"{_LOADER}.load_weights_only", _loaded),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def _verified(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


_configured = _iterated = _loaded = _verified
