"""SGLang's arguments: a model at an address becomes a folder with its small files, and weights elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .._errors import InvalidError, UnsupportedError
from .._paths import without_secrets
from ._drift import warn_untested
from ._fetched import ADVICE, Fetched, fetch, is_ours, refuse_revision, with_weights
from ._format import FORMAT
from ._known import SGLANG
from ._remote import is_remote

#: The step of SGLang's that resolves paths. A plugin may put itself around it.
STEP = "handle_model_source_paths"
_MODELS = ("model_path", "speculative_draft_model_path")
_TOKENIZER = "tokenizer_path"


def resolve(args: Any, previous: Callable[[Any], None]) -> None:
    """Fetches the small files of the models that are at addresses, and declares their folders instead.

    Raises:
        PenstockError: as `fetch`.
        InvalidError: there is a revision beside an address; the loader's configuration is no JSON.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    said = resolving_view(args)
    if isinstance(said.load_format, str) and said.load_format.lower() == FORMAT:
        warn_untested(SGLANG)
    if is_ours(said.load_format, said.model_path):
        declare_resolution(args, FORMAT, **_resolved(said))
    previous(args)


def refuse(args: Any) -> None:
    """In an SGLang that has no such step: raises UnsupportedError for arguments with the address of a model."""
    if is_ours(args.load_format, args.model_path):
        place = without_secrets(args.model_path)
        raise UnsupportedError(f"{place}: this SGLang is not one that Penstock knows (it lacks {STEP}): {ADVICE}")


def _resolved(said: Any) -> dict[str, Any]:
    from ._engine import settings_of

    given = said.model_loader_extra_config or {}
    if not isinstance(given, Mapping):
        with suppress(ValueError, TypeError):
            given = json.loads(given)
    if not isinstance(given, Mapping):
        raise InvalidError("SGLang: --model-loader-extra-config: give an object of JSON")
    settings = settings_of(given, "SGLang")
    refuse_revision(said.model_path, revision=said.revision)
    # SGLang puts "main" where nothing is given
    draft = None if said.speculative_draft_model_revision == "main" else said.speculative_draft_model_revision
    refuse_revision(said.speculative_draft_model_path, speculative_draft_model_revision=draft)
    places = {name: getattr(said, name) for name in (*_MODELS, _TOKENIZER)}
    found: dict[str, Fetched] = {}
    for name, place in places.items():
        if isinstance(place, str) and is_remote(place) and place not in found:
            code, weights = bool(said.trust_remote_code), name in _MODELS
            found[place] = fetch(place, settings.storage, code=code, weights=weights, which=settings.files)
    models = [found[places[name]] for name in _MODELS if places[name] in found]
    return {
        **{name: found[place].folder for name, place in places.items() if place in found},
        "model_loader_extra_config": json.dumps(with_weights(given, models)),
        # SGLang takes no colon in a name, except in the address of a bucket
        "served_model_name": said.served_model_name or said.model_path.removeprefix("hf://"),
    }
