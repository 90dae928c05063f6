"""LoRA adapters by name: found below one prefix and nowhere else, and loaded from where they are."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
from leases import leases_on
from penstock.bench import reference
from penstock.integrations import _lora
from penstock.integrations._lora import CONFIGURATION, WEIGHTS, Adapters
from penstock.integrations._lora_settings import (
    BASES,
    KEPT_BYTES,
    MOST_ADAPTERS,
    MOST_BYTES,
    PREFIX,
    LoraSettings,
    lora_settings,
)
from penstock.integrations._lora_weights import AdapterWeights, KeptAdapters, weights_of
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from s3_server import KEYS, Bucket, serving
from test_hub_network import Hub, home, hub  # noqa: F401
from test_s3 import nothing_in_the_environment  # noqa: F401

BASE = "org/base"
NAMES = [f"base_model.model.layers.{layer}.q_proj.lora_{side}.weight" for layer in range(4) for side in "AB"]


def configuration(**more: Any) -> bytes:
    return json.dumps({"peft_type": "LORA", "base_model_name_or_path": BASE, "r": 8, **more}).encode()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / WEIGHTS
    return synth.write_file(path, [Tensor(name, "BF16", (8, 64)) for name in NAMES])


@pytest.fixture
def folder(tmp_path: Path, weights: Path) -> Path:
    """Adapters in a folder; "mine" is one."""
    root = tmp_path / "adapters"
    put(root / "mine", weights)
    return root


def put(place: Path, weights: Path, **more: Any) -> Path:
    place.mkdir(parents=True)
    (place / WEIGHTS).write_bytes(weights.read_bytes())
    (place / CONFIGURATION).write_bytes(configuration(**more))
    return place


@pytest.fixture
def bucket(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    objects = {f"loras/mine/{WEIGHTS}": weights.read_bytes(), f"loras/mine/{CONFIGURATION}": configuration()}
    objects |= {f"secret/{WEIGHTS}": weights.read_bytes(), f"secret/{CONFIGURATION}": configuration()}
    key, secret = next(iter(KEYS.items()))
    with serving(Bucket(objects)) as bucket:
        for name, value in {"ENDPOINT": bucket.endpoint, "ACCESS_KEY_ID": key, "SECRET_ACCESS_KEY": secret}.items():
            monkeypatch.setenv(f"PENSTOCK_STORAGE_{name}", value)
        yield bucket


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def made(prefix: object, **more: object) -> LoraSettings:
    names = {"bases": BASES, "most_bytes": MOST_BYTES, "most_adapters": MOST_ADAPTERS}
    found = lora_settings({PREFIX: str(prefix), **{names[name]: str(value) for name, value in more.items()}})
    assert found is not None
    return found


def loaded(folder: str | None, settings: LoraSettings, kept: KeptAdapters | None = None) -> dict[str, Any]:
    """All tensors, as an engine asks for them that has safetensors in mind. By default nothing is kept."""
    assert folder is not None
    file = str(Path(folder, WEIGHTS))
    address = weights_of(file, settings)
    assert address is not None and settings.contains(address)
    with AdapterWeights(file, address, kept or KeptAdapters(0)) as opened:
        assert list(opened) == opened.keys()
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def is_right(found: dict[str, Any], weights: Path) -> bool:
    torch = pytest.importorskip("torch")
    entries = reference.entries_of(weights)
    assert found.keys() == entries.keys()
    return all(
        found[name].view(torch.uint8).numpy().tobytes() == reference.raw(entry).tobytes()
        for name, entry in entries.items()
    )


# Found and loaded


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_an_adapter_is_found_and_loaded_from_where_it_is(
    kind: str, folder: Path, bucket: Bucket, weights: Path, temporary: Path
) -> None:
    settings = made(folder if kind == "folder" else "s3://bucket/loras/")
    adapters = Adapters(settings)
    found = adapters.find("mine", BASE)
    assert found is not None
    # What is on the disk has no weights
    on_disk = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    assert on_disk < weights.stat().st_size / 3
    assert Path(found, CONFIGURATION).read_bytes() == configuration()
    assert [stat.S_IMODE(path.stat().st_mode) for path in temporary.iterdir()] == [0o700]
    with pytest.raises(penstock.TruncatedError):
        penstock.open(Path(found, WEIGHTS))
    assert is_right(loaded(found, settings), weights)
    adapters.close()
    assert list(temporary.iterdir()) == []


def test_one_load_brings_all_tensors(bucket: Bucket, temporary: Path, weights: Path) -> None:
    settings = made("s3://bucket/loras")
    found = Adapters(settings).find("mine", BASE)
    asked = len(bucket.asked)
    assert is_right(loaded(found, settings), weights)
    assert len(bucket.asked) - asked == 2  # the header, and all tensors


def test_an_adapter_on_a_web_server(bucket: Bucket, weights: Path, temporary: Path) -> None:
    settings = made(f"{bucket.endpoint}/bucket/loras")
    adapters = Adapters(settings)
    assert is_right(loaded(adapters.find("mine", BASE), settings), weights)
    assert adapters.find("none", BASE) is None


def test_an_adapter_of_the_hub(hub: Hub, weights: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    put(temporary / "repository", weights)
    put(temporary / "repository-sub", weights, r=4)
    hub.add("org/name", temporary / "repository")
    hub.add("org/name", temporary / "repository-sub", within="sub")
    for prefix, name in (("hf://org", "name"), ("hf://org/name", "sub"), ("hf://org/name@main", "sub")):
        settings = made(prefix)
        adapters = Adapters(settings)
        assert is_right(loaded(adapters.find(name, BASE), settings), weights)
        assert adapters.find(f"{name}/none", BASE) is None
    assert Adapters(made("hf://org")).find("a--b", BASE) is None


def test_a_name_that_is_resolved_again_gets_what_is_there_now(folder: Path, temporary: Path, weights: Path) -> None:
    settings = made(folder)
    adapters = Adapters(settings)
    first = adapters.find("mine", BASE)
    (folder / "mine" / CONFIGURATION).write_bytes(configuration(r=4))
    second = adapters.find("mine", BASE)
    assert first is not None and second is not None
    assert json.loads(Path(first, CONFIGURATION).read_bytes())["r"] == 8  # requests that wait name it
    assert json.loads(Path(second, CONFIGURATION).read_bytes())["r"] == 4


def test_an_adapter_that_was_replaced_is_an_error_that_says_what_to_do(
    bucket: Bucket, temporary: Path, weights: Path
) -> None:
    settings = made("s3://bucket/loras")
    found = Adapters(settings).find("mine", BASE)
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    bucket.objects[f"loras/mine/{WEIGHTS}"] = bytes(changed)
    with pytest.raises(penstock.ChangedError, match="unload it in the engine, and ask again") as caught:
        loaded(found, settings)
    assert caught.value.path == f"s3://bucket/loras/mine/{WEIGHTS}"


def test_a_configuration_that_is_replaced_meanwhile(bucket: Bucket, temporary: Path) -> None:
    """It and the weights are of one version."""
    key = f"loras/mine/{CONFIGURATION}"
    always = False

    def script(target: str, number: int) -> None:
        if WEIGHTS in target and (always or json.loads(bucket.objects[key])["r"] == 8):
            bucket.objects[key] = configuration(r=json.loads(bucket.objects[key])["r"] + 1)

    bucket.script = script
    found = Adapters(made("s3://bucket/loras")).find("mine", BASE)
    assert found is not None and json.loads(Path(found, CONFIGURATION).read_bytes())["r"] == 9
    always = True
    with pytest.raises(penstock.ChangedError, match="is being replaced: ask again later"):
        Adapters(made("s3://bucket/loras")).find("mine", BASE)


# Kept


def test_an_adapter_that_was_kept_needs_its_bucket_no_more(bucket: Bucket, temporary: Path, weights: Path) -> None:
    settings = made("s3://bucket/loras")
    found = Adapters(settings).find("mine", BASE)
    kept = KeptAdapters(8192)
    first = loaded(found, settings, kept)
    assert is_right(first, weights) and kept.nbytes == 8192
    for tensor in first.values():
        tensor.zero_()  # an engine scales tensors in place
    bucket.objects.clear()
    bucket.asked.clear()
    for _ in range(2):
        again = loaded(found, settings, kept)
        assert is_right(again, weights)
        for tensor in again.values():
            tensor.zero_()
    assert bucket.asked == []
    with AdapterWeights(str(Path(found or "", WEIGHTS)), "s3://bucket/loras/mine", kept) as opened:
        assert opened.metadata() == {}
        with pytest.raises(penstock.UnknownTensorError, match="no tensor 'x'"):
            opened.get_tensor("x")
    with pytest.raises(penstock.NotFoundError):
        loaded(found, settings)


@pytest.fixture(params=["leases", "no leases"])
def leases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether files can be leased."""
    pytest.importorskip("torch")
    from penstock.integrations._mapped import Mapped, NotMapped

    def refused(self: Mapped, always: bool) -> str:
        raise NotMapped("not here")

    if request.param == "no leases":
        monkeypatch.setattr(Mapped, "_not_here", refused)
    return bool(request.param == "leases")


def test_adapters_in_a_folder_are_kept_as_they_were(leases: bool, folder: Path, temporary: Path, weights: Path) -> None:
    """Not as mapped files, which change and end with them."""
    settings = made(folder)
    found = Adapters(settings).find("mine", BASE)
    kept = KeptAdapters(8192)
    assert is_right(loaded(found, settings, kept), weights)
    with (folder / "mine" / WEIGHTS).open("r+b") as file:
        file.truncate(100)
    assert is_right(loaded(found, settings, kept), weights)


class Held:
    """Copies of leased files, which are not made until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch")
        from penstock.integrations._mapped import Mapped

        self.begun, self.go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        close = Mapped.close

        def held(mapped: Mapped) -> None:
            self.begun.set()
            assert self.go.wait(60)
            close(mapped)
            if self.error is not None:
                raise self.error

        monkeypatch.setattr(Mapped, "close", held)

    def expect(self, kept: KeptAdapters, file: Path) -> None:
        """A copy of the file has begun."""
        self.is_possible(kept, file)
        assert self.begun.wait(60)

    @staticmethod
    def is_possible(kept: KeptAdapters, file: Path) -> None:
        """Skips the test where no thread copies."""
        if any(one.copying is None for one in kept._kept.values()):
            pytest.skip(f"{file} was not mapped: no leases, or no memory")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.go.set()
    penstock.quiesce(60)


def test_an_adapter_in_a_folder_is_there_before_its_copy(
    held: Held, folder: Path, temporary: Path, weights: Path
) -> None:
    settings, file = made(folder), folder / "mine" / WEIGHTS
    found = Adapters(settings).find("mine", BASE)
    kept = KeptAdapters(8192)
    first = loaded(found, settings, kept)
    held.expect(kept, file)
    assert leases_on(file) == 1
    assert is_right(first, weights) and kept.nbytes == 8192
    for tensor in first.values():
        tensor.zero_()  # an engine scales tensors in place
    # Whatever wants the copy waits for it
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(loaded, found, settings, kept)
        with pytest.raises(FuturesTimeoutError):  # Python 3.10 has two
            again.result(0.1)
        held.go.set()
        assert is_right(again.result(60), weights)
    assert leases_on(file) == 0
    file.write_bytes(b"")
    assert is_right(loaded(found, settings, kept), weights)


def test_a_program_that_truncates_the_file_meanwhile_does_not_change_the_copy(
    held: Held, folder: Path, temporary: Path, weights: Path
) -> None:
    settings, file = made(folder), folder / "mine" / WEIGHTS
    found = Adapters(settings).find("mine", BASE)
    kept = KeptAdapters(8192)
    loaded(found, settings, kept)
    subprocess.run([sys.executable, "-c", "import os, sys; os.truncate(sys.argv[1], 0)", file], check=True, timeout=60)
    assert file.stat().st_size == 0
    held.go.set()
    assert is_right(loaded(found, settings, kept), weights)


def test_a_copy_that_cannot_be_made_is_not_kept(
    held: Held, folder: Path, temporary: Path, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = made(folder)
    found = Adapters(settings).find("mine", BASE)
    kept = KeptAdapters(8192)
    held.error = penstock.ChangedError("it was changed")
    held.go.set()
    loaded(found, settings, kept)
    file = folder / "mine" / WEIGHTS
    held.is_possible(kept, file)
    ordeal.soon(lambda: kept.nbytes == 0, 60)  # nobody has asked for it
    assert leases_on(file) == 0
    assert kept.get(str(Path(found or "", WEIGHTS))) is None
    assert "no copy of the adapter" in caplog.text and "it was changed" in caplog.text
    held.error = None
    for _ in range(2):
        assert is_right(loaded(found, settings, kept), weights)
    assert kept.nbytes == 8192


def test_a_file_that_cannot_be_mapped_is_copied_before_it_is_given(
    folder: Path, temporary: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The load has succeeded by then, and the engine would end with an error."""
    pytest.importorskip("torch")
    from penstock.integrations import _mapped

    def fails(*arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(_mapped, "Mapped", fails)
    settings = made(folder)
    found = Adapters(settings).find("mine", BASE)
    kept = KeptAdapters(8192)
    error: Exception = penstock.StalledError("on purpose")
    assert is_right(loaded(found, settings, kept), weights)
    assert kept.nbytes == 8192 and "on purpose" in caplog.text
    (folder / "mine" / WEIGHTS).write_bytes(b"")
    assert is_right(loaded(found, settings, kept), weights)


def test_a_forked_child_does_not_wait_for_a_copy(held: Held, folder: Path, temporary: Path, weights: Path) -> None:
    """The thread that makes it is the parent's."""
    settings = made(folder)
    found = Adapters(settings).find("mine", BASE)
    kept = KeptAdapters(8192)
    loaded(found, settings, kept)
    held.expect(kept, folder / "mine" / WEIGHTS)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = int(kept.get(str(Path(found or "", WEIGHTS))) is not None)
        finally:
            os._exit(code)
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return pid == child

    ordeal.soon(has_ended, 60)
    assert ended == [0]


def test_what_is_kept_has_a_bound_and_the_adapter_used_last_stays(
    bucket: Bucket, temporary: Path, weights: Path
) -> None:
    for name in "abc":
        for file in (WEIGHTS, CONFIGURATION):
            bucket.objects[f"loras/{name}/{file}"] = bucket.objects[f"loras/mine/{file}"]
    settings = made("s3://bucket/loras")
    adapters = Adapters(settings)
    found = {name: adapters.find(name, BASE) for name in "abc"}

    def asked(name: str, kept: KeptAdapters) -> int:
        before = len(bucket.asked)
        assert is_right(loaded(found[name], settings, kept), weights)
        return len(bucket.asked) - before

    kept = KeptAdapters(2 * 8192 + 100)
    assert [asked(name, kept) > 0 for name in "abacab"] == [True, True, False, True, False, True]
    assert kept.nbytes == 2 * 8192
    small = KeptAdapters(8191)
    assert asked("a", small) and asked("a", small) and small.nbytes == 0


# Folders that nobody uses


def test_a_folder_that_was_released_is_removed_later(
    folder: Path, temporary: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_lora.time, "monotonic", lambda: now)
    adapters = Adapters(made(folder))
    folders = [Path(adapters.find("mine", BASE) or "") for _ in range(3)]
    adapters.release(str(folders[0]))
    now += 599
    adapters.release(str(folders[2]))
    folders.append(Path(adapters.find("mine", BASE) or ""))
    assert all(one.is_dir() for one in folders)  # a worker may still open it
    now += 2
    folders.append(Path(adapters.find("mine", BASE) or ""))
    assert [one.is_dir() for one in folders] == [False, True, True, True, True]
    now += 600
    monkeypatch.setattr(adapters, "_owner", -1)  # a forked child removes nothing
    adapters.find("mine", BASE)
    assert [one.is_dir() for one in folders] == [False, True, True, True, True]
    monkeypatch.undo()


def test_an_adapter_whose_folder_was_removed_does_not_count(
    folder: Path, temporary: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_lora.time, "monotonic", lambda: now)
    for name in "ab":
        put(folder / name, weights)
    adapters = Adapters(made(folder, most_adapters=1))
    older, newer = adapters.find("a", BASE), adapters.find("a", BASE)
    adapters.release(older or "")
    now += 601
    with pytest.raises(penstock.LimitError):
        adapters.find("b", BASE)
    assert not Path(older or "").is_dir() and Path(newer or "").is_dir()
    adapters.release(newer or "")
    now += 601
    assert adapters.find("b", BASE) is not None


# Unknown


def test_a_name_that_is_unknown_is_not_asked_for_again_at_once(
    bucket: Bucket, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_lora.time, "monotonic", lambda: now)
    adapters = Adapters(made("s3://bucket/loras"))
    assert adapters.find("late", BASE) is None
    asked = len(bucket.asked)
    assert asked > 0
    for file in (WEIGHTS, CONFIGURATION):
        bucket.objects[f"loras/late/{file}"] = bucket.objects[f"loras/mine/{file}"]
    now += 9.9
    assert adapters.find("late", BASE) is None and len(bucket.asked) == asked
    assert adapters.find("late", "another base") is None and len(bucket.asked) > asked  # another question
    now += 0.2
    assert adapters.find("late", BASE) is not None


def test_so_many_unknown_names_are_remembered(folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from requests."""
    monkeypatch.setattr(_lora, "_MOST_UNKNOWN", 10)
    adapters = Adapters(made(folder))
    for number in range(100):
        assert adapters.find(f"none{number}", BASE) is None
    assert len(adapters._unknown) == 10
    put(folder / "none0", folder / "mine" / WEIGHTS)
    put(folder / "none99", folder / "mine" / WEIGHTS)
    assert adapters.find("none0", BASE) is not None and adapters.find("none99", BASE) is None


# Nowhere else

OUTSIDE = [
    "../secret", "mine/../../secret", "..", ".", "", "/", "//", "/etc", "mine/", "/mine", "mine//x", "./mine", ".mine",
    "..%2fsecret", "%2e%2e/secret", "mine%00", "mine\0", "mine\n", "\nmine", "mine?x", "mine#x", "mine\\..\\secret",
    "s3://bucket/secret", "hf://org/name", "mine@main", "a:b", "~root", "$HOME", "mine mine", "müne", "a/b/c/d/e",
    "x" * 201, "-mine",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=[repr(name[:20]) for name in OUTSIDE])
def test_a_name_never_leads_out_of_the_prefix(name: str, folder: Path, bucket: Bucket, temporary: Path, weights: Path):
    put(folder.parent / "secret", weights)
    for prefix in (folder, "s3://bucket/loras"):
        assert Adapters(made(prefix)).find(name, BASE) is None
    assert bucket.asked == []  # nothing is sent for such a name
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("what", ["folder", CONFIGURATION, WEIGHTS])
def test_a_link_never_leads_out_of_the_prefix(
    what: str, folder: Path, temporary: Path, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = put(folder.parent / "secret", weights)
    if what == "folder":
        (folder / "linked").symlink_to(secret)
    else:
        put(folder / "linked", weights)
        (folder / "linked" / what).unlink()
        (folder / "linked" / what).symlink_to(secret / what)
    assert Adapters(made(folder)).find("linked", BASE) is None
    assert "out of the folder of adapters" in caplog.text
    # One that stays inside is followed
    (folder / "other").symlink_to(folder / "mine")
    assert Adapters(made(folder)).find("other", BASE) is not None


def test_a_note_that_names_another_place_is_refused(folder: Path, temporary: Path) -> None:
    """A folder that somebody else has made gets no further than the prefix."""
    settings = made(folder)
    forged = folder / "mine"
    for address in ("s3://bucket/secret/x", f"{folder}/../secret/{WEIGHTS}", f"{folder}x/{WEIGHTS}", "/etc/passwd"):
        (forged / ".penstock-adapter").write_text(json.dumps({"weights": address}))
        with pytest.raises(penstock.InvalidError, match="not below the prefix"):
            weights_of(str(forged / WEIGHTS), settings)
    assert weights_of(str(forged / "other.safetensors"), settings) is None
    assert weights_of(str(folder / WEIGHTS), settings) is None


# What is no adapter, and what cannot be used


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda place: (place / WEIGHTS).unlink(), None),
        (lambda place: (place / CONFIGURATION).unlink(), None),
        (lambda place: (place / CONFIGURATION).write_text("{"), "is not one"),
        (lambda place: (place / CONFIGURATION).write_text("[]"), "is not one"),
        (lambda place: (place / CONFIGURATION).write_bytes(configuration(peft_type="IA3")), "of the type 'IA3'"),
        (
            lambda place: (place / CONFIGURATION).write_bytes(configuration(base_model_name_or_path="other")),
            f"is for the model 'other', and '{BASE}' is served: if that is the same, set {BASES}=other",
        ),
    ],
    ids=["no weights", "no configuration", "no JSON", "no object", "another kind", "another model"],
)
def test_what_is_no_adapter_is_none(
    change: Callable[[Path], object], said: str | None, folder: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / "mine")
    assert Adapters(made(folder)).find("mine", BASE) is None
    assert said is None or said in caplog.text


def test_adapters_may_name_other_models_that_the_operator_knows(folder: Path, temporary: Path) -> None:
    for bases, expected in (("", False), ("other", False), (f"other, {BASE}", True), ("*", True)):
        settings = made(folder, bases=bases)
        assert (Adapters(settings).find("mine", "/models/base") is not None) == expected


def test_what_is_too_large_or_too_many_is_an_error(folder: Path, temporary: Path, weights: Path) -> None:
    with pytest.raises(penstock.LimitError, match=rf"has 8192 bytes, and {MOST_BYTES} allows 8000"):
        Adapters(made(folder, most_bytes="8KB")).find("mine", BASE)
    for name in "abc":
        put(folder / name, weights)
    adapters = Adapters(made(folder, most_adapters=2))
    assert adapters.find("a", BASE) and adapters.find("b", BASE) and adapters.find("a", BASE)
    with pytest.raises(penstock.LimitError, match=f"2 adapters were resolved, as many as {MOST_ADAPTERS} allows"):
        adapters.find("c", BASE)
    (folder / "mine" / CONFIGURATION).write_bytes(configuration(x="x" * (1 << 20)))
    with pytest.raises(penstock.UnsupportedError, match="are read"):
        adapters.find("mine", BASE)


def test_a_server_that_refuses_is_an_error_and_not_an_unknown_adapter(
    bucket: Bucket, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = Adapters(made("s3://bucket/loras"))
    assert adapters.find("none", BASE) is None
    bucket.script = lambda target, number: (403, {}, b"<Error><Code>AccessDenied</Code></Error>")
    with pytest.raises(penstock.AccessError):
        adapters.find("mine", BASE)


def test_damaged_weights_are_an_error(folder: Path, temporary: Path) -> None:
    (folder / "mine" / WEIGHTS).write_bytes(b"\0" * 100)
    with pytest.raises(penstock.PenstockError, match=WEIGHTS):
        Adapters(made(folder)).find("mine", BASE)


# Settings


def test_without_a_prefix_there_is_nothing() -> None:
    assert lora_settings({}) is None
    assert lora_settings({"PENSTOCK_IO": "direct"}) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({PREFIX: "relative/folder"}, "give an absolute path, or an address"),
        ({PREFIX: "/not/there"}, "there is no such folder"),
        ({PREFIX: "ftp://host/x"}, "give a folder, or an address"),
        ({PREFIX: "s3://"}, "name the bucket"),
        ({PREFIX: "hf://"}, "name the bucket, the server or the organisation"),
        ({PREFIX: "s3://bucket/../other"}, "name the bucket"),
        ({PREFIX: "https://host/x?sig=secret"}, "has no query"),
        ({PREFIX: "/", MOST_BYTES: "many"}, "give a size"),
        ({PREFIX: "/", KEPT_BYTES: "-1"}, "give a size"),
        ({PREFIX: "/", MOST_ADAPTERS: "0"}, "give a number from 1 on"),
        ({PREFIX: "/", MOST_ADAPTERS: "1.5"}, "give a number from 1 on"),
        ({PREFIX: "/", BASES: "\udcff"}, "must be UTF-8"),
        ({BASES: "x"}, f"{BASES} is set, and {PREFIX} is not"),
        ({"PENSTOCK_LORA_FOLDER": "/x"}, "PENSTOCK_LORA_FOLDER: there is no such variable; known are"),
    ],
)
def test_impossible_settings_are_refused_by_name(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError if said != "there is no such folder" else FileNotFoundError, match=said) as caught:
        lora_settings(environment)
    assert "secret" not in str(caught.value)
    assert any(name in str(caught.value) for name in environment)


def test_many_are_found_at_the_same_time(folder: Path, temporary: Path, weights: Path) -> None:
    for number in range(8):
        put(folder / f"a{number}", weights)
    settings = made(folder)
    adapters = Adapters(settings)

    async def ask() -> list[str | None]:
        names = [f"a{number % 8}" for number in range(32)]
        return await asyncio.gather(*(asyncio.to_thread(adapters.find, name, BASE) for name in names))

    found = asyncio.run(ask())
    assert None not in found and len(set(found)) == 32
    assert sorted(temporary.glob("*/*")) == sorted(Path(folder or "") for folder in found)
