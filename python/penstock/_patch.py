"""`patch`: programs written for safetensors use this engine, and need not be changed for it.

What is replaced are names: every attribute of a module that is safetensors' own object. What they are replaced by
decides with each call whether penstock can do what is asked, and leaves to safetensors what it cannot.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from importlib import import_module
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

from _penstock_after import After

from . import _safe_open
from ._checkpoint import OneFile
from ._errors import (
    AccessError,
    HeaderError,
    IndexFileError,
    InvalidError,
    NotACheckpointError,
    NotFoundError,
    PenstockError,
    ReadError,
    SchemeError,
    TruncatedError,
    UnsupportedError,
)
from ._frameworks import device_for, framework_named, need

PACKAGES = (
    "safetensors",
    "transformers",
    "diffusers",
    "accelerate",
    "peft",
    "huggingface_hub",
    "torch.distributed.checkpoint",
)
"""In which modules that are already imported names are replaced. Those imported later take the replaced ones."""

_PLACING = "transformers.core_model_loading"
_FUNCTIONS = {
    "safetensors.torch": ("load_file", "load_model", "save", "save_file", "save_model"),
    "safetensors.numpy": ("load_file", "save", "save_file"),
    "safetensors.flax": ("load_file", "save", "save_file"),
    _PLACING: ("spawn_materialize",),
}
"""Replacements besides ``safe_open``: functions of safetensors by those that the module of penstock with the same
last name has, and the function of transformers that is told where a slice goes."""

_OWN_LOAD_BYTES = 1 << 20
"""Smaller tensors are not worth a load of their own onto a GPU, which takes 0.2 ms whatever its size: they are mapped,
hundreds at once, and copied by torch."""


_BACKENDS = ("mmap", "pread")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
"""Names of devices that safetensors and penstock both understand."""

_NO_FILE = (
    AccessError,
    HeaderError,
    IndexFileError,
    InvalidError,
    NotACheckpointError,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
)
"""Errors that say something of the file or the arguments: safetensors is asked too. All others are of the machine (a
mount that hangs, a failing disk, a limit), and trying again could hang or kill the process."""


class _Routing:
    """The objects of safetensors that are replaced in this process, and their replacements."""

    def __init__(self) -> None:
        # Another thread waits for it. The thread that has it may come again, in a signal handler or a `__del__`: then
        # `settle` finds that `patches` has changed, and begins anew
        self.lock = threading.RLock()
        self.patches: set[Patch] = set()
        """The patches in force."""
        self.safe_open: Any = None
        """The class that ``safetensors.safe_open`` was."""
        self.pairs: dict[int, tuple[Any, Any]] = {}
        """(theirs, ours) by the identity of theirs."""
        self.modules: dict[str, ModuleType] = {}
        """Where names were replaced; some may be gone from ``sys.modules`` when they are put back."""
        self.places: set[str] = set()
        self.finder = After(_FUNCTIONS, self.imported)

    def begin(self, patch: Patch) -> None:
        """One patch more: replaces what there is to replace, in modules imported since the last one too."""
        try:
            import safetensors
        except ImportError as error:
            raise UnsupportedError(
                "safetensors is not installed, so that nothing can be using it: call penstock's own functions"
            ) from error
        with self.lock:
            if self.safe_open is None:  # once: what is there later may be somebody's wrapper around ours
                self.safe_open = safetensors.safe_open
                self.pairs[id(self.safe_open)] = self.safe_open, safe_open
            self.patches.add(patch)
            try:
                self._settle()
            except BaseException:
                self.end(patch)  # nobody gets it, so nobody could undo it
                raise

    def end(self, patch: Patch) -> None:
        """One patch less, if it was in force; after the last one every name is what it was."""
        with self.lock:
            known = patch in self.patches
            self.patches.discard(patch)
            # Names may be left of an end that Ctrl-C has interrupted
            if known or (self.modules and not self.patches):
                self._settle()

    def _settle(self) -> None:
        """Has every name be what it is to be, also where patches come and go in the middle of it."""
        while True:
            wanted = bool(self.patches)
            if wanted:
                for name in _FUNCTIONS.keys() & sys.modules.keys():
                    self._learn(sys.modules[name])
                self._replace(name for name in list(sys.modules) if f"{name}.".startswith(_PREFIXES))
                if self.finder not in sys.meta_path:
                    self.finder.install()
            else:
                self._put_back()
            if wanted == bool(self.patches):
                return

    def _put_back(self) -> None:
        self.finder.remove()
        theirs = {id(ours): theirs for theirs, ours in self.pairs.values()}
        # Whoever imported a name meanwhile has ours, and may be any module
        for name, module in [*self.modules.items(), *list(sys.modules.items())]:
            if not f"{name}.".startswith("penstock."):
                _swap(module, theirs)
        self.modules.clear()
        self.places.clear()

    def imported(self, module: ModuleType) -> None:
        """Replaces the functions of a module of safetensors that has just been imported."""
        with self.lock:
            if self.patches:
                self._learn(module)
                self._replace([module.__name__])

    def _learn(self, module: Any) -> None:
        if not isinstance(module, ModuleType):  # None: somebody does not want it to be imported
            return
        for name in _FUNCTIONS[module.__name__]:
            function: Any = vars(module).get(name)
            # Not ours, nor somebody else's wrapper
            own = getattr(function, "__module__", None) == module.__name__ and not hasattr(function, "__wrapped__")
            if own and id(function) not in self.pairs:
                ours = _placing(function) if module.__name__ == _PLACING else _routed(function, module.__name__)
                self.pairs.setdefault(id(function), (function, ours))

    def _replace(self, names: Iterable[str]) -> None:
        ours = {key: pair[1] for key, pair in self.pairs.items()}
        for name in names:
            module = sys.modules.get(name)
            swapped = _swap(module, ours)
            if swapped and module is not None:
                self.modules[name] = module
                self.places.update(f"{name}.{attribute}" for attribute in swapped)


_PREFIXES = tuple(f"{package}." for package in PACKAGES)


def _swap(module: Any, by: Mapping[int, Any]) -> list[str]:
    """Replaces a module's attributes that are these very objects; which ones. Wakes no lazy module."""
    if not isinstance(module, ModuleType):
        return []
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    if by.keys().isdisjoint(map(id, list(names.values()))):
        return []
    found = {name: by[id(value)] for name, value in list(names.items()) if id(value) in by}
    names.update(found)
    return list(found)


_routing = _Routing()


def _unlock() -> None:
    """In a forked child: a lock that another thread held is held for ever."""
    _routing.lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


# What the names are replaced by


def _can_open(framework: Any, device: Any, backend: Any) -> bool:
    """Whether `penstock.safe_open` and safetensors both take these.

    What only penstock takes (``torch.device``, "rocm:0", "dlpack") is refused by safetensors, in its own words.
    """
    if isinstance(device, str) and not _DEVICE.fullmatch(device):
        return False
    if device is not None and (isinstance(device, bool) or not isinstance(device, (str, int))):
        return False
    return backend in _BACKENDS and framework is not None and _can_load(framework, device)


def _can_load(framework: Any, device: Any) -> bool:
    """Whether penstock loads tensors of this framework, which safetensors has too, to this device."""
    try:
        name = framework_named(framework)
        where = device_for(device, framework)
        need(name)
    except PenstockError:
        return False
    if isinstance(device, int):
        # To torch a number is one of the accelerator that it was built for
        accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
        current = None if accelerator is None else accelerator.current_accelerator()
        if current is not None and current.type != "cuda":
            return False
    return name != "dlpack" and (where.is_cpu or (name == "pt" and where.is_gpu))


def _path(filename: Any) -> str | None:
    """The path that was given; None if safetensors takes no such thing for one: bytes, a list."""
    path = os.fspath(filename) if isinstance(filename, (str, os.PathLike)) else None
    return path if isinstance(path, str) else None


class _Asking(threading.local):
    """Whether this thread is in a function of safetensors that is to do all of its work itself."""

    safetensors = False


_asking = _Asking()


def _opened(path: str, ours: Callable[[OneFile], Any], theirs: Callable[[], Any]) -> Any:
    """The result of ``ours`` for the file at ``path``; safetensors opens or refuses a file that penstock cannot open.

    So programs get the exceptions that they know, in the words that they match. What penstock has to say is the
    exception's ``__cause__``.
    """
    try:
        return ours(OneFile(path))
    except (*_NO_FILE, ReadError) as error:
        if not isinstance(error, _NO_FILE) and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        if isinstance(error, NotACheckpointError) and _is_fifo(path):
            raise  # safetensors would wait for somebody who writes to it
        if isinstance(error, SchemeError):
            raise  # a FileNotFoundError too, as safetensors', and it says why
        refused = error
    _asking.safetensors = True
    try:
        return theirs()
    except Exception as error:
        raise error from refused
    finally:
        _asking.safetensors = False
        del refused  # an error keeps this frame, and would keep itself with it


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)  # noqa: PTH116 - as in `_safe_open`
    except (OSError, ValueError):
        return False


def _can_save(tensors: Any) -> bool:
    """Whether these are tensors by name, of kinds that penstock saves, and nothing special."""
    if not isinstance(tensors, dict):
        return False
    torch, numpy, jax = (sys.modules.get(name) for name in ("torch", "numpy", "jax"))
    for tensor in tensors.values():
        if torch is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            if tensor.device.type not in ("cpu", "cuda") or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
                return False
        elif numpy is not None and type(tensor) is numpy.ndarray:
            if not tensor.dtype.isnative:
                return False
        elif jax is None or not isinstance(tensor, jax.Array):
            return False
    return True


def _saved(ours: Callable[..., Any], arguments: dict[str, Any]) -> tuple[bool, Any]:
    """Whether penstock has saved this, in the layout of safetensors, and what its function returned."""
    tensors: Any = arguments.get("tensors", arguments.get("tensor_dict"))
    if "model" in arguments:
        state_dict = getattr(arguments["model"], "state_dict", None)
        if not callable(state_dict):
            return False, None
        # Asked for once: what hooks it has may gather tensors from other processes
        state = tensors = dict(state_dict())
        arguments = {**arguments, "model": SimpleNamespace(state_dict=lambda: state)}
    if not _can_save(tensors) or ("filename" in arguments and _path(arguments["filename"]) is None):
        return False, None
    try:
        return True, ours(**arguments, layout="compact")
    except SchemeError:  # safetensors would write to a folder of that name
        raise
    except (InvalidError, UnsupportedError):  # before anything was written
        return False, None


def _routed(theirs: Callable[..., Any], module: str) -> Callable[..., Any]:
    """``theirs``, or where that can do what is asked the function of that name in penstock's counterpart of its module.

    What penstock refuses to save is saved, or refused in its own words, by safetensors.
    """
    from inspect import signature

    interface = signature(theirs)
    framework = module.rpartition(".")[2]

    @wraps(theirs)
    def routed(*args: Any, **kwargs: Any) -> Any:
        if not _routing.patches:
            return theirs(*args, **kwargs)
        ours = getattr(import_module(f"penstock.{framework}"), theirs.__name__)
        try:
            arguments = interface.bind(*args, **kwargs).arguments
        except TypeError:  # theirs says what is wrong with them
            return theirs(*args, **kwargs)
        if arguments.keys() <= signature(ours).parameters.keys():
            if theirs.__name__.startswith("save"):
                done, returned = _saved(ours, arguments)
                if done:
                    return returned
            elif _can_open(framework, arguments.get("device", "cpu"), arguments.get("backend", "mmap")):
                path = _path(arguments["filename"])
                if path is not None:
                    return _opened(
                        path, lambda file: ours(**{**arguments, "filename": file}), partial(theirs, *args, **kwargs)
                    )
        return theirs(*args, **kwargs)

    return routed


def _placing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' function that indexes a slice and moves what comes of it, with slices that load onto that device.

    The tensor is where it is to go before it is moved there, so that its bytes have not been in host memory, and is a
    plain tensor from the beginning: none that is made when somebody moves it could hold more.
    """
    from inspect import signature

    interface = signature(theirs)

    @wraps(theirs)
    def placing(*args: Any, **kwargs: Any) -> Any:
        if not _routing.patches:
            return theirs(*args, **kwargs)
        try:
            bound = interface.bind(*args, **kwargs)
        except TypeError:
            return theirs(*args, **kwargs)
        part, device = bound.arguments.get("tensor"), bound.arguments.get("device")
        if isinstance(part, _safe_open.Slice) and device is not None and _can_load("pt", device):
            bound.arguments["tensor"] = part._bound_for(device, _OWN_LOAD_BYTES)
        return theirs(*bound.args, **bound.kwargs)

    return placing


class _AnyHandle(type):
    """Makes the files that safetensors has opened instances of the class that stands for its own."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, _theirs())


def _theirs() -> Any:
    return _routing.safe_open or import_module("safetensors").safe_open


class safe_open(_safe_open.safe_open, metaclass=_AnyHandle):
    """Replaces ``safetensors.safe_open`` while it is patched: opens a file as `penstock.safe_open` does.

    What that does not take (other frameworks, devices, arguments) is opened by safetensors. What safetensors does not
    take (a folder, an index, a list, the name of a repository) it refuses.
    """

    def __new__(
        cls, filename: Any, framework: Any, device: Any = "cpu", *, backend: Any = "mmap", **others: Any
    ) -> Any:
        theirs = partial(_theirs(), filename, framework, device, backend=backend, **others)
        if _routing.patches and not _asking.safetensors and not others and _can_open(framework, device, backend):
            path = _path(filename)
            if path is not None:
                return _opened(path, lambda file: cls._of(file, framework, device, backend), theirs)
        return theirs()

    def __init__(
        self, filename: Any, framework: Any, device: Any = "cpu", *, backend: Any = "mmap", **others: Any
    ) -> None:
        """Nothing: `__new__` has opened it, or it is of another class."""

    @classmethod
    def _of(cls, file: OneFile, framework: Any, device: Any, backend: Any) -> safe_open:
        made = object.__new__(cls)
        _safe_open.safe_open.__init__(made, file, framework, device, backend=backend)
        return made


class Patch:
    """The result of `patch`. It is in force until `undo` or the end of its ``with`` block, even if you drop it."""

    def __init__(self) -> None:
        _routing.begin(self)

    @property
    def places(self) -> list[str]:
        """The names that are replaced, such as ``transformers.modeling_utils.safe_open``.

        Names that a module imported after the patch are not listed. `undo` finds them too.
        """
        with _routing.lock:
            return sorted(_routing.places) if self in _routing.patches else []

    def undo(self) -> None:
        """Ends this patch. When all patches have ended, every name is what it was. A second call does nothing.

        A function that a program kept elsewhere (in a closure, as a default argument) calls safetensors again.
        """
        _routing.end(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch() -> Patch:
    """Makes libraries that use safetensors use penstock, until the patch is undone.

    It replaces ``safe_open``, ``load_file``, ``load_model``, ``save``, ``save_file`` and ``save_model`` of safetensors
    in the modules of safetensors, transformers, diffusers, accelerate, peft, huggingface_hub and
    torch.distributed.checkpoint, under any name. Modules that are imported later get penstock's functions too. What
    penstock cannot do (some frameworks, devices and kinds of tensors) is still done by safetensors. What safetensors
    does not take (folders, indexes, lists, names of repositories) is refused with safetensors' own exceptions. Saved
    files have the same bytes as those of safetensors.

        with penstock.patch():
            model = AutoModel.from_pretrained("model/")

        patched = penstock.patch()
        ...
        patched.undo()

    ``python -m penstock.run script.py`` does the same for a program that you cannot edit; ``PENSTOCK_PATCH=1`` in the
    environment for all that it starts, where the package penstock-patch is installed.

    Patches may be nested, and undone in any order: the names are put back when the last patch is undone. Files that
    were opened before then stay usable. Any thread may call it. Loads that are running are not affected.

    Raises:
        UnsupportedError: safetensors is not installed.
    """
    return Patch()
