"""vLLM's LoRA adapters by address: a resolver for its server, and the weights for its workers. Imports vLLM."""

from __future__ import annotations

import asyncio
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from .._errors import UnsupportedError
from ._lora import Adapters
from ._lora_settings import PREFIX, LoraSettings
from ._lora_weights import AdapterWeights, KeptAdapters, weights_of

NAME = "Penstock Resolver"
"""The name of the resolver in vLLM's registry."""
_LOOKUPS = 4
"""Names that are looked for at a time."""


class Resolved(LoRARequest, weakref=True):  # type: ignore[misc, call-arg]
    """vLLM's request for an adapter. The resolver learns when nobody refers to it any more.

    vLLM's server keeps it while the adapter is loaded. Each of its requests for completions keeps it, too, until the
    engine was told that it has ended. The engine and its workers get copies, which are plain.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and bool(self.lora_name == other.lora_name)

    def __hash__(self) -> int:
        return hash(self.lora_name)


class PenstockResolver(LoRAResolver):  # type: ignore[misc]
    """Finds adapters below a prefix, by the names that requests have."""

    def __init__(self, settings: LoraSettings) -> None:
        self._adapters = Adapters(settings)
        # Not asyncio's: names come from requests, and a server that does not answer would hold up what else waits there
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="adapters")

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """The request for an adapter, or None if there is none of this name.

        Raises:
            PenstockError: it is there, or may be, and cannot be used.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._resolved, base_model_name, lora_name)

    def _resolved(self, base_model_name: str, lora_name: str) -> Resolved | None:
        # On the thread: where a client that disconnects cancels the wait, the request that nobody gets ends, too
        folder = self._adapters.find(lora_name, base_model_name)
        if folder is None:
            return None
        # vLLM gives it a number of its own
        made = Resolved(lora_name=lora_name, lora_int_id=1 + abs(hash(lora_name)) % (1 << 31), lora_path=folder)
        weakref.finalize(made, self._adapters.release, folder).atexit = False
        return made


class _Safetensors:
    """The module safetensors as vLLM's loader of adapters sees it."""

    def __init__(self, module: ModuleType, settings: LoraSettings) -> None:
        self._module, self._settings = module, settings
        self._kept = KeptAdapters(settings.kept_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def safe_open(self, filename: Any, *args: Any, **more: Any) -> Any:
        """The weights of an adapter that was resolved, or what safetensors opens."""
        address = weights_of(os.fspath(filename), self._settings)
        if address is None:
            return self._module.safe_open(filename, *args, **more)
        return AdapterWeights(os.fspath(filename), address, self._kept)


def install(settings: LoraSettings) -> None:
    """Registers the resolver, and has adapters of it loaded by Penstock. May be called repeatedly.

    Raises:
        UnsupportedError: this vLLM reads adapters in another way.
    """
    place = _place_of_reading()
    if not isinstance(place.safetensors, _Safetensors):
        place.safetensors = _Safetensors(place.safetensors, settings)
    if NAME not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(NAME, PenstockResolver(settings))


def _place_of_reading() -> Any:
    """The module of vLLM that opens the files of adapters."""
    try:
        from vllm.lora import lora_model as module
    except ImportError:
        module = None
    model = getattr(module, "LoRAModel", None)
    if hasattr(getattr(module, "safetensors", None), "safe_open") and hasattr(model, "from_local_checkpoint"):
        return module
    raise UnsupportedError(
        f"{PREFIX} is set, and this vLLM does not read adapters where 0.33 does "
        f"(vllm.lora.lora_model, safetensors.safe_open): unset {PREFIX}, and use vLLM's own resolvers"
    )
