"""Serving engines: their own loaders say which bytes go where, and one load brings them there.

`penstock.integrations.vllm` and `penstock.integrations.sglang` are plugins that the engines find by themselves.
`penstock.integrations.tgis` is a class for engines that ask for shards by name. `Recorder` is what they stand on. See
docs/engines.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._recorder import Recorder

__all__ = ["Recorder"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """`Recorder` needs torch, and the plugins are imported before it."""
        if name != "Recorder":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        from ._recorder import Recorder

        globals()[name] = Recorder
        return Recorder
