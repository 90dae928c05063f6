"""SGLang: ``--load-format penstock``.

SGLang finds `register` by an entry point and calls it in every process. To SGLang the format is ``safetensors`` with a
mark. The first configuration of a process that asks for it has SGLang's default loader give its models deferred
tensors, at start-up and in ``update_weights_from_disk``. Until then only the check of the format is hooked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from .._events import in_engine
from ._drift import difference, once_per_process, tested, warn_untested, way_out
from ._format import FORMAT
from ._known import SGLANG

_logger = logging.getLogger("penstock")
_CONFIG = "sglang.srt.configs.load_config.LoadConfig"
_VERIFY = "_verify_load_format"
_RESOLVE = "sglang.srt.server_args.ServerArgs.resolve_once"


def register() -> None:
    """Makes the load format ``penstock`` known to SGLang. May be called repeatedly.

    If SGLang takes no load formats of plugins, one line is logged, and the format is not there. If another place that
    this hooks into has another form than the known one (`_known.SGLANG`), a configuration of this format is an error
    that names it. With ``"strict": false`` it loads as ``safetensors`` does.
    """
    try:
        from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        getattr(LoadConfig, _VERIFY)  # SGLang logs an exception for a hook on what is not there
    except (ImportError, AttributeError) as error:
        known = f"{tested(SGLANG)}: {error}"
        _say_once(f"penstock: no load format {FORMAT}, because this SGLang's interface differs from that of {known}")
        return
    in_engine("sglang")
    if FORMAT in LOAD_FORMAT_CHOICES:
        return
    HookRegistry.register(f"{_CONFIG}.{_VERIFY}", _verified, HookType.AROUND)
    add_load_format_choices([FORMAT])
    from ._sglang_arguments import STEP, refuse, resolve

    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(STEP)(resolve)
    except (ImportError, ValueError):
        HookRegistry.register(_RESOLVE, refuse, HookType.BEFORE)


def _verified(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(config.load_format, str) and config.load_format.lower() == FORMAT:
        _claim(config)
    return original(config, *args, **kwargs)


def _claim(config: Any) -> None:
    """Takes a configuration whose format is penstock: to SGLang it is safetensors.

    Raises:
        InvalidError: an unknown key in ``--model-loader-extra-config``. The error lists the known ones.
        UnsupportedError: this SGLang's loader is not known, and the user has not accepted a load of its own.
    """
    from .._errors import InvalidError
    from ._engine import settings_of  # with torch, which is there when a configuration is made

    given = config.model_loader_extra_config or {}
    if not isinstance(given, Mapping):
        raise InvalidError("SGLang: --model-loader-extra-config: give an object of JSON")
    settings = settings_of(given, "SGLang")
    config.load_format, config.model_loader_extra_config = settings.engine_format, {}
    unknown = difference(SGLANG)
    if unknown is None:
        try:
            from ._sglang_loader import install

            install()
        except (ImportError, AttributeError) as error:
            unknown = f"its loader's interface differs from that of {tested(SGLANG)}: {error}"
    if unknown is not None:
        _refuse(unknown, settings.strict)
        return
    warn_untested(SGLANG)
    config.penstock = settings


def _refuse(why: str, strict: bool) -> None:
    """Raises UnsupportedError, or warns once in a process."""
    from ._strict import not_used

    if strict or once_per_process(why):
        not_used(SGLANG.name, why, strict, way_out(SGLANG))


@functools.cache
def _say_once(text: str) -> None:
    _logger.warning("%s", text)
