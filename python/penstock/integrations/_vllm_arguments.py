"""vLLM's arguments: a model at an address becomes a folder with its small files, and weights elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .._errors import InvalidError, UnsupportedError
from .._paths import without_secrets
from ._drift import once_per_process, warn_untested, way_out
from ._fetched import ADVICE, Fetched, fetch, is_ours, refuse_revision, with_weights
from ._format import FORMAT
from ._known import VLLM
from ._remote import is_remote
from ._strict import not_used, strict_of

#: Methods that make vLLM's configuration from its arguments. Servers that only prepare requests call the second alone.
_MAKE = ("create_engine_config", "create_model_config")
#: Arguments that this reads or changes.
_FIELDS = ("model", "tokenizer", "hf_config_path", "trust_remote_code", "served_model_name", "load_format")
_MORE = ("model_loader_extra_config", "speculative_config", "revision", "code_revision", "tokenizer_revision")


def install(arguments: Any, unknown: str | None = None) -> None:
    """Has the class of vLLM's arguments take addresses for models, where the load format is penstock's.

    Args:
        arguments: The class. If its interface has changed, it refuses such addresses.
        unknown: What is not known of this vLLM. The class refuses the load format then, unless the user accepts vLLM's
            own way, and addresses.
    """
    known = getattr(arguments, "__dataclass_fields__", {})
    lacking = [name for name in _MAKE if not callable(getattr(arguments, name, None))]
    lacking += [name for name in (*_FIELDS, *_MORE) if name not in known]
    why = unknown
    if lacking and why is None:
        why = f"{arguments.__name__} lacks {', '.join(lacking)}"
    if why is None:
        for name in _MAKE:
            setattr(arguments, name, _fetching(getattr(arguments, name)))
        return
    # Subclasses inherit these. As dataclasses they have an __init__ of their own
    for name in [name for name in _MAKE if callable(getattr(arguments, name, None))] or ["__post_init__"]:
        setattr(arguments, name, _refusing(getattr(arguments, name, lambda args: None), why, unknown))


def _fetching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(args: Any, *more: Any, **named: Any) -> Any:
        if _has_our_format(args):
            warn_untested(VLLM)
        if _is_ours(args):
            _resolve(args)
        return original(args, *more, **named)

    return make


def _refusing(original: Callable[..., Any], why: str, unknown: str | None) -> Callable[..., Any]:
    """A step from arguments to a configuration, in a vLLM that is not known: in the first process of a start."""

    @functools.wraps(original)
    def refuse(args: Any, *more: Any, **named: Any) -> Any:
        if _is_ours(args):
            place = without_secrets(args.model)
            raise UnsupportedError(f"{place}: this vLLM is not one that Penstock knows ({why}): {ADVICE}")
        if unknown is not None and _has_our_format(args):
            strict = strict_of(getattr(args, "model_loader_extra_config", None), VLLM.name)
            if strict or once_per_process(unknown):
                not_used(VLLM.name, unknown, strict, way_out(VLLM))
        return original(args, *more, **named)

    return refuse


def _has_our_format(args: Any) -> bool:
    load_format = getattr(args, "load_format", None)
    return isinstance(load_format, str) and load_format.lower() == FORMAT


def _is_ours(args: Any) -> bool:
    return is_ours(getattr(args, "load_format", None), getattr(args, "model", None))


def _resolve(args: Any) -> None:
    """Fetches the small files of the models that are at addresses, and names their folders instead.

    Raises:
        PenstockError: as `fetch`.
        InvalidError: there is a revision beside an address.
    """
    from ._engine import settings_of  # with torch, which is there when a configuration is made
    from ._sleep import install_in_server

    given = args.model_loader_extra_config or {}
    if not isinstance(given, Mapping):
        raise InvalidError("vLLM: --model-loader-extra-config: give an object of JSON")
    settings = settings_of(given, "vLLM")
    draft = args.speculative_config
    refuse_revision(args.model, revision=args.revision, code_revision=args.code_revision)
    refuse_revision(args.tokenizer or args.model, tokenizer_revision=args.tokenizer_revision)
    if isinstance(draft, Mapping):
        beside = {name: draft.get(name) for name in ("revision", "code_revision")}
        refuse_revision(draft.get("model") or args.model, **beside)
    found: dict[str, Fetched] = {}

    def folder(place: Any, weights: bool = True) -> Any:
        if not isinstance(place, str) or not is_remote(place):
            return place
        if place not in found:
            code = bool(args.trust_remote_code)
            found[place] = fetch(place, settings.storage, code=code, weights=weights, which=settings.files)
        return found[place].folder

    install_in_server()
    model = folder(args.model)
    if isinstance(draft, Mapping) and "model" in draft:
        draft = {**draft, "model": folder(draft["model"])}
    weights = with_weights(given, list(found.values()))
    tokenizer, configuration = folder(args.tokenizer, False), folder(args.hf_config_path, False)
    if not args.served_model_name:
        args.served_model_name = args.model
    args.model, args.tokenizer, args.hf_config_path = model, tokenizer, configuration
    args.speculative_config, args.model_loader_extra_config = draft, weights
