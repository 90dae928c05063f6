"""Commands for what is on servers: `doctor`, `verify` and `convert` with web addresses and repositories of the Hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from conftest import LAYOUT, Oracle, raw
from penstock import _contents, _doctor, _doctor_network
from penstock import cli as command_line
from penstock._convert import convert
from test_hub_network import COMMIT, GOOD, Hub, home, hub  # noqa: F401
from test_web import INDEX, SECRET, Web, authority, files, serving, web  # noqa: F401

torch = pytest.importorskip("torch")


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """The status of a command, and its JSON; nothing of a signature is in it, or in what it writes besides."""
    status = command_line.main([*map(str, arguments), "--json"])
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    return status, json.loads(said.out)


def spans(asked: list[str]) -> list[tuple[int, int]]:
    """The ranges of the requests."""
    found = [re.search(r"bytes=(\d+)-(\d+)", line) for line in asked]
    return [(int(span[1]), int(span[2]) + 1) for span in found if span]


# doctor


def test_doctor_asks_the_server_and_measures_it(capsys, big):
    with serving(big.parent) as server:
        status, found = run(capsys, "doctor", f"{server(big.name)}?{SECRET}")
        asked = server.close()
    assert status == 0 and found["ok"] and found["error"] is None
    assert found["source"] == server(big.name)
    assert found["checkpoint"]["tensors"] == 24 and found["checkpoint"]["files"] == 1
    look = found["asked"]
    assert [one["server"] for one in look["servers"]] == [server.address]
    assert look["servers"][0]["status"] == 206 and look["servers"][0]["connect_seconds"] > 0
    assert look["servers"][0]["tls_seconds"] is look["servers"][0]["lookup_seconds"] is None
    assert (look["ranges"], look["validator"], look["connections"]) == (True, "strong ETag", 1)
    assert len(look["round_trips"]) == 5 and look["size"] == big.stat().st_size
    one, many = found["rates"]["one"], found["rates"]["many"]
    assert one["connections"] == 1 and one["received_bytes"] > 0 and many["received_bytes"] > 0
    # What was measured came from the server, and of different bytes
    served = sum(last - first for first, last in spans(asked))
    assert one["received_bytes"] + many["received_bytes"] <= served <= 2 * big.stat().st_size
    assert all(SECRET in line for line in asked)


def test_doctor_without_a_measurement_asks_a_few_times(capsys, big):
    with serving(big.parent) as server:
        status, found = run(capsys, "doctor", server(big.name), "--no-measure")
        asked = server.close()
    assert status == 0 and found["rates"] == {}
    assert spans(asked)[1:] == [(0, 1)] * 5


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("", 0, "the checkpoint is too small to measure a rate"),
        ("moved/", 0, "the checkpoint is too small"),
        ("weak/", 0, "the server gives no strong ETag"),
        ("dated/", 0, "the server gives no strong ETag"),
        ("closing/", 0, "the server closes its connections"),
        ("whole/", 1, "the server does not support range requests"),
        ("locked/", 1, "the server answers, and does not let us"),
        ("none/", 1, "the server answers, with status 404"),
    ],
)
def test_doctor_says_what_is_missing_and_what_to_do(capsys, web, path, status, says):  # noqa: F811
    address = f"{web(path + LAYOUT.files[0])}?{SECRET}"
    assert command_line.main(["doctor", address]) == status
    said = capsys.readouterr().out
    assert says in said.partition("therefore:")[2], said
    assert SECRET not in said and web.address in said
    assert ("error" in said) is bool(status)


def test_doctor_says_where_a_redirect_leads(capsys, web):  # noqa: F811
    _, found = run(capsys, "doctor", web(f"moved/{LAYOUT.files[0]}"))
    assert [server["status"] for server in found["asked"]["servers"]] == [302, 206]


def test_doctor_says_of_what_is_no_checkpoint_that_the_server_is_fine(capsys, tmp_path):
    (tmp_path / "page.safetensors").write_text("<html>" * 100)
    with serving(tmp_path) as server:
        status, found = run(capsys, "doctor", server("page.safetensors"))
    assert status == 1 and found["asked"]["ranges"] is True
    assert found["therefore"] == [
        "the server sends what was asked for, and it cannot be opened as a checkpoint: see the error"
    ]


@pytest.mark.parametrize(
    ("address", "says"),
    [("http://127.0.0.1:9/x", "no server takes connections there"), ("http://a.invalid/x", "name has no address")],
)
def test_doctor_says_how_far_it_came(capsys, address, says):
    status, found = run(capsys, "doctor", f"{address}?{SECRET}")
    assert status == 1 and says in found["therefore"][0]
    assert found["error"]["kind"] == "Io"
    [server] = found["asked"]["servers"]
    assert server["connect_seconds"] is server["status"] is None


def test_doctor_of_https(capsys, authority, small):  # noqa: F811
    trusted, certificate, key = authority
    with serving(small, certificate, key) as server:
        status, found = run(capsys, "doctor", server(INDEX))
        assert status == 1 and "--storage ca=FILE" in found["therefore"][0]
        assert found["asked"]["servers"][0]["connect_seconds"] is not None
        assert found["asked"]["servers"][0]["tls_seconds"] is None
        status, found = run(capsys, "doctor", server(INDEX), "--storage", f"ca={trusted}")
        assert status == 0, found["error"]
        assert found["asked"]["servers"][0]["tls_seconds"] > 0 and found["asked"]["servers"][0]["lookup_seconds"] > 0
        assert found["asked"]["connections"] == 1


def test_doctor_says_where_each_setting_comes_from(capsys, web, monkeypatch, small):  # noqa: F811
    monkeypatch.setenv("PENSTOCK_STORAGE_REQUEST_BYTES", "1000000")
    monkeypatch.setenv("PENSTOCK_STORAGE_SECRET_ACCESS_KEY", "S3CRET")
    monkeypatch.setenv("https_proxy", "http://user:S3CRET@proxy")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert (
        command_line.main(["doctor", web(INDEX), "--storage", "connections=3", "--storage", "ca=some.pem", "--json"])
        == 0
    )
    said = capsys.readouterr().out
    found = json.loads(said)
    assert found["settings"]["connections"] == {"value": "3", "from": "storage="}
    assert found["settings"]["request_bytes"] == {"value": "1000000", "from": "PENSTOCK_STORAGE_REQUEST_BYTES"}
    assert "https_proxy" in found["environment"] and found["proxy"] is None, "this machine is reached without one"
    assert command_line.main(["doctor", str(small), "--no-measure", "--json"]) == 0
    of_files = capsys.readouterr().out
    assert "PENSTOCK_STORAGE_SECRET_ACCESS_KEY" in said and "PENSTOCK_STORAGE_SECRET_ACCESS_KEY" in of_files
    assert "S3CRET" not in said + of_files
    assert command_line.main(["doctor", web(INDEX), "--storage", "connections=0"]) == command_line.USAGE


@pytest.mark.parametrize("name", ["secret_access_key", "access_key_id", "session_token", "HF_TOKEN", "HTTPS_PROXY"])
def test_no_secret_is_shown(name):
    assert _doctor.shown(name, "S3CRET") == "(set)"


def test_what_doctor_measures_with_is_bounded():
    wanted = [_contents.Piece(number, None, 10) for number in range(10)]
    assert len(_doctor_network._upto(wanted, 35)) == 3
    assert len(_doctor_network._upto(wanted, 1)) == 1
    assert len(_doctor_network._upto(wanted, 1000)) == 10
    assert _doctor_network._upto([], 1000) == []


def test_doctor_stops_a_measurement_that_takes_too_long(monkeypatch, big):
    monkeypatch.setattr(_doctor_network, "_SECONDS", 0.0)
    monkeypatch.setattr(_doctor_network, "_WINDOW", 4 << 20)
    with serving(big.parent) as server:
        found = _doctor_network.examine(server(big.name), {"request_bytes": 1 << 20})
    assert found["ok"]
    assert found["rates"]["many"]["received_bytes"] < big.stat().st_size / 4


def test_doctor_of_the_hub(capsys, hub, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", GOOD)
    hub.set(secret=SECRET)
    for source in ("hf://org/name", "org/name"):
        status, found = run(capsys, "doctor", source)
        assert status == 0, found["error"]
        assert found["hub"] == {"endpoint": hub.endpoint, "token": "HF_TOKEN"}
        assert [server["server"] for server in found["asked"]["servers"]] == [hub.endpoint, hub.storage]
        assert f"the bytes come from {hub.storage}" in found["therefore"][0]
        assert GOOD not in json.dumps(found) and found["environment"]["HF_TOKEN"] == "(set)"
    status, found = run(capsys, "doctor", "hf://org/none")
    assert status == 1 and "there is no repository org/none" in found["error"]["message"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert command_line.main(["doctor", "hf://org/name"]) == command_line.ERROR


# verify


def test_verify_hashes_what_the_server_sends(capsys, web, small):  # noqa: F811
    status, found = run(capsys, "verify", f"{web(INDEX)}?{SECRET}", "--sha256")
    assert status == command_line.UNCOMPARED and found["problems"] == []
    expected = [
        {"path": web(name), "ok": True, "sha256": sha256(small / name), "compared_with": None} for name in LAYOUT.files
    ]
    assert found["files"] == expected
    assert penstock.open(web(INDEX)).verify(progress=False) == dict.fromkeys(files(web))


def test_verify_without_digests_reads_headers_only(capsys, big):
    with serving(big.parent) as server:
        assert command_line.main(["verify", server(big.name)]) == 0
        asked = server.close()
    assert "contents were not read: --sha256 reads every byte" in " ".join(capsys.readouterr().out.split())
    assert len(asked) == 1


def test_verify_reads_every_byte_once(big):
    with serving(big.parent) as server:
        assert penstock.open(server(big.name)).verify(progress=False) == {server(big.name): None}
        asked = server.close()
    found = sorted(spans(asked[1:]))  # the first one is the open's
    assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
    assert found[-1][1] == big.stat().st_size


@pytest.mark.parametrize("size", [16, 64, 1000])
def test_pieces_of_tensors_are_all_their_bytes_in_order(monkeypatch, every, size):
    monkeypatch.setattr(_contents, "PIECE", size)
    with serving(every.parent) as server:
        [found] = penstock.open(server(every.name))._hashed({}, False, None)
    assert found.digest == sha256(every)


def test_verify_compares_with_a_list(capsys, web, small, tmp_path):  # noqa: F811
    listed = tmp_path / "sums"
    listed.write_text("".join(f"{sha256(small / name)}  {name}\n" for name in LAYOUT.files))
    status, found = run(capsys, "verify", web(INDEX), "--digests", listed)
    assert status == 0 and found["compared"] == 3
    listed.write_text(f"{'0' * 64}  {LAYOUT.files[1]}\n")
    status, found = run(capsys, "verify", f"{web(INDEX)}?{SECRET}", "--digests", listed)
    assert status == command_line.FAILED
    [problem] = found["problems"]
    assert problem["path"] == web(LAYOUT.files[1]) and problem["kind"] == "Digest"
    assert "or was on the way here" in problem["message"]


def test_verify_of_files_on_a_disk_and_on_a_server(capsys, web, small):  # noqa: F811
    status, found = run(capsys, "verify", files(web)[0], small / LAYOUT.files[1], "--sha256")
    assert status == command_line.UNCOMPARED
    assert {file["sha256"] for file in found["files"]} == {sha256(small / name) for name in LAYOUT.files[:2]}


def test_verify_notices_another_version(small, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    with serving(folder) as server:
        checkpoint = penstock.open(server(INDEX))
        name = LAYOUT.files[1]
        shutil.copy(small / name, folder / "new")
        (folder / "new").rename(folder / name)
        with pytest.raises(penstock.ChangedError) as caught:
            checkpoint.verify(progress=False)
    assert caught.value.path == server(name)


@pytest.mark.parametrize(
    ("removed", "path", "status"),
    [(LAYOUT.files[1], INDEX, 1), (INDEX, INDEX, 3), ("", f"locked/{INDEX}", 3)],
)
def test_verify_tells_what_is_missing_from_what_is_not_there(capsys, small, tmp_path, removed, path, status):
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    if removed:
        (folder / removed).unlink()
    with serving(folder) as server:
        assert run(capsys, "verify", f"{server(path)}?{SECRET}")[0] == status


def test_verify_of_a_server_that_is_not_there_is_an_error(capsys):
    assert run(capsys, "verify", "http://127.0.0.1:9/x.safetensors")[0] == command_line.ERROR


def test_verify_compares_with_what_the_hub_says(capsys, hub, small):  # noqa: F811
    assert command_line.main(["verify", "hf://org/name"]) == 0
    assert "The Hub has their digests: --sha256 reads every byte" in " ".join(capsys.readouterr().out.split())
    status, found = run(capsys, "verify", "hf://org/name", "--sha256")
    assert status == 0 and found["compared"] == 3
    base = f"{hub.endpoint}/org/name/resolve/{COMMIT}"
    assert found["files"] == [
        {"path": f"{base}/{name}", "ok": True, "sha256": sha256(small / name), "compared_with": "Hub"}
        for name in LAYOUT.files
    ]
    assert set(penstock.open("hf://org/name").verify(progress=False).values()) == {"Hub"}


def test_verify_of_the_hub_notices_damage_and_what_has_no_digest(capsys, hub, small):  # noqa: F811
    content = (small / LAYOUT.files[1]).read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    hub.set(digests={LAYOUT.files[0]: "0" * 64, LAYOUT.files[1]: git, LAYOUT.files[2]: ""})
    status, found = run(capsys, "verify", "hf://org/name", "--sha256")
    assert status == command_line.FAILED
    assert [file["compared_with"] for file in found["files"]] == ["Hub", "Hub", None]
    assert found["files"][1]["git_sha1"] == git
    [problem] = found["problems"]
    assert problem["path"].endswith(LAYOUT.files[0])
    with pytest.raises(penstock.DigestError):
        penstock.open("hf://org/name").verify(progress=False)


def test_verify_of_a_server_that_stops_answering_is_a_stall(hub):  # noqa: F811
    checkpoint = penstock.open("hf://org/name")
    hub.set(hang="storage")
    with pytest.raises(penstock.StalledError) as caught:
        checkpoint.verify(progress=False, stall_timeout=0.5)
    assert str(caught.value.path).startswith(hub.endpoint)


# convert


@pytest.fixture
def into(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "new"


@pytest.mark.parametrize(
    "more",
    [(), ("--layout", "compact"), ("--order", "layer"), ("--max-shard-size", "3kB"), ("--dtype", "bfloat16")],
    ids=" ".join,
)
def test_what_is_on_a_server_is_written_anew(capsys, web, small, into, more):  # noqa: F811
    status, found = run(capsys, "convert", f"{web(INDEX)}?{SECRET}", into, "--no-fsync", *more)
    assert status == 0 and found["report"]["tensors"] == len(penstock.open(small))
    expected = penstock.open(small).load(dtype="bfloat16" if "--dtype" in more else None)
    written = penstock.open(into).load()
    assert {name: raw(tensor) for name, tensor in written.items()} == {name: raw(t) for name, t in expected.items()}
    assert penstock.open(into).metadata == penstock.open(small).metadata


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_what_no_framework_has_is_written_anew_from_a_server(every, into, dtype):
    with serving(every.parent) as server:
        convert([server(every.name)], into, dtype=dtype, layout="compact", fsync=False, progress=False)
    there, here = into / "there", into / "here"
    shutil.move(into / "model.safetensors", there)
    convert([str(every)], into, dtype=dtype, layout="compact", fsync=False, progress=False)
    shutil.move(into / "model.safetensors", here)
    assert there.read_bytes() == here.read_bytes()


def test_convert_reads_every_byte_once(big, into):
    with serving(big.parent) as server:
        convert([server(big.name)], into, fsync=False, progress=False)
        asked = server.close()
    found = sorted(spans(asked[1:]))  # the first one is the open's
    assert all(last == first for (_, last), (first, _) in itertools.pairwise(found))
    assert sum(last - first for first, last in found) <= big.stat().st_size
    Oracle(big).same(penstock.open(into).load(framework="pt"))


def test_convert_of_a_file_that_changes_leaves_nothing(small, tmp_path, into, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    opened = penstock._convert.open_as

    def opening(*arguments: Any, **more: Any) -> penstock.Checkpoint:
        checkpoint = opened(*arguments, **more)
        shutil.copy(small / LAYOUT.files[2], folder / "new")
        (folder / "new").rename(folder / LAYOUT.files[2])
        return checkpoint

    monkeypatch.setattr(penstock._convert, "open_as", opening)
    with serving(folder) as server, pytest.raises(penstock.ChangedError):
        convert([server(INDEX)], into, fsync=False, progress=False)
    assert list(into.iterdir()) == []


def test_convert_of_the_hub(capsys, hub, small, into):  # noqa: F811
    status, _ = run(capsys, "convert", "hf://org/name", into, "--no-fsync")
    assert status == 0
    written = penstock.open(into).load(framework="pt")
    Oracle(small).same({name: written[name] for name in penstock.open(small)})


def test_pickles_are_read_from_a_disk_only(tmp_path, into):
    torch.save({"a": torch.zeros(3)}, tmp_path / "m.bin")
    with serving(tmp_path) as server, pytest.raises(penstock.PenstockError):
        convert([server("m.bin")], into, progress=False)


@pytest.mark.parametrize(
    ("address", "status", "says"),
    [
        ("https://a.invalid/there", command_line.ERROR, "cannot be written to"),
        ("s3://bucket/there", command_line.USAGE, "nothing can be written with a signature in the address"),
    ],
)
def test_where_nothing_can_be_written_is_said_before(capsys, monkeypatch, tmp_path, web, address, status, says):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    signed = f"{address}?{SECRET}"
    assert command_line.main(["convert", web(INDEX), signed]) == status
    said = capsys.readouterr().err
    assert says in said and SECRET not in said
    with pytest.raises(penstock.PenstockError, match=says) as caught:
        convert([web(INDEX)], signed)
    assert SECRET not in str(caught.value)
    assert web.close() == [] and list(tmp_path.iterdir()) == []
