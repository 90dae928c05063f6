"""Public reports about servers that answer otherwise than clients expect, as small programs.

The verdict is that of the code before these tests were written (commit 9c12921).

| report | what happens there | first verdict |
|---|---|---|
| versitygw#2398, noobaa-core#9138, s3-tests#671 | `aws-chunked` is kept and sent with the object | failed at first |
| aws-sdk-kotlin#1358 | objects with an empty `Content-Encoding` | failed at first |
| donsetch#290 | S3 gives back `Content-Encoding: UTF-8` | failed at first |
| mini_portile#85 | `Content-Encoding: chunked` | failed at first |
| bun#35871, minio/mc#2209 | an object that was stored with `gzip` is wanted as it is stored | failed at first |
| conda-package-streaming#132, opendal#4618, aiohttp#1588 | 416 to a range that passes the end | failed at first |
| hf-mirror-site#31, huggingface_hub#4741 | a mirror gives no `Content-Length` | failed at first |
| arrow-rs-object-store#774 | Google Cloud Storage sends all, in chunks, without a length | failed at first |
| httpie#96, scdl#248 | a body that breaks off is taken for the whole | right at once |
| obstore#429, multistore#116 | one key with an empty segment stops a listing | failed at first |
| s3fs#770, aws-api#126 | keys that begin with a slash | failed at first |
| s3ninja#251, s3mock#144, mock-aws-s3#92 | a truncated listing gives no token | failed at first |
| versitygw#770, minio-js#1314 | the last page is called truncated, and the next one is empty | right at once |
| s3cmd#730, aeroftp#122 | the endpoint answers a listing with a web page | failed at first |
| sccache#265, aws-sdk-ruby#133 | 307 with Location for a new bucket | failed at first |
| snowflake-connector-python#2900 | 307 that names another region | failed at first |
| racket#3941, fluux-messenger#532 | the first address of a name does not answer | failed at first |
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import _core
from raw_server import Asked, part, raw_server
from s3_server import KEYS, Bucket, error, serving
from test_answers import loads
from test_listings import OldS3, Resigned, storage_of
from test_s3 import nothing_in_the_environment  # noqa: F401

KEY, SECRET = next(iter(KEYS.items()))


# Content-Encoding


@pytest.mark.parametrize(
    "encoding", ["aws-chunked", "", "UTF-8", "chunked", "binary", "gzip", "aws-chunked,gzip", "x-unknown"]
)
def test_versitygw_2398_kotlin_1358_donsetch_290_mini_portile_85_bun_35871(shard, encoding):
    loads(shard, lambda asked, content: part(asked, content, f"Content-Encoding: {encoding}"))


def test_a_body_that_was_compressed_on_its_way_is_refused(shard):
    """The counter-example: neither length nor range shows that these are the bytes that were stored."""
    answer = lambda asked, content: part(asked, content, "Content-Encoding: gzip", chunked=5000)  # noqa: E731
    with pytest.raises(penstock.ReadError, match=r"the body is encoded \(gzip\)"):
        loads(shard, answer)


# Ranges that pass the end


@pytest.mark.parametrize("says", [False, True])
def test_conda_package_streaming_132_opendal_4618_aiohttp_1588(tiny, says):
    def answer(asked: Asked, content: bytes) -> bytes:
        if asked.range(0)[1] <= len(content):
            return part(asked, content)
        told = f"Content-Range: bytes */{len(content)}\r\n" if says else ""
        return f"HTTP/1.1 416 Requested Range Not Satisfiable\r\n{told}Content-Length: 4\r\n\r\nsorry"[:-1].encode()

    loads(tiny, answer)
    index = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()
    with raw_server(lambda asked: answer(asked, index if "json" in asked.target else tiny.read_bytes())) as served:
        Oracle(tiny).same(penstock.open(f"{served.url}/model.safetensors.index.json").load(framework="np"))


# No length


@pytest.mark.parametrize("size", [1, 100, 8192, 1 << 20])
def test_hf_mirror_site_31_parts_in_chunks(shard, size):
    loads(shard, lambda asked, content: part(asked, content, chunked=size))


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_huggingface_hub_4741_small_files_without_a_length(tiny, size):
    """What a mirror that knows no ranges gives of the files beside the weights."""
    contents = {
        "config.json": b'{"a": [1, 2]}',
        "merges.txt": b"a b\n" * 999,
        "tokenizer.json": b'{"x": "%s"}' % (b"y" * (9 << 20)),
    }
    with raw_server(lambda asked: part(asked, contents[asked.target[1:]], status="200 OK", chunked=size)) as served:
        found = _core.contents([f"{served.url}/{name}" for name in contents], 64 << 20)
        assert found == list(contents.values())


def test_arrow_rs_object_store_774_an_index_comes_whole(tiny):
    index = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()

    def answer(asked: Asked) -> bytes:
        if "json" in asked.target:
            return part(asked, index, "x-goog-stored-content-encoding: gzip", status="200 OK", chunked=11)
        return part(asked, tiny.read_bytes())

    with raw_server(answer) as served:
        Oracle(tiny).same(penstock.open(f"{served.url}/model.safetensors.index.json").load(framework="np"))


@pytest.mark.parametrize("cut", [1, 40, 100])
def test_httpie_96_scdl_248_what_breaks_off_is_no_file(tiny, cut):
    """Neither weights nor small files: the connection's end is the only one that there is."""
    content = tiny.read_bytes()
    with raw_server(lambda asked: part(asked, content, status="200 OK", length=False, end=-cut)) as served:
        with pytest.raises(penstock.PenstockError):
            penstock.open(f"{served.url}/x.safetensors")
        for name in ("merges.txt", "config.json", "tokenizer.model"):
            with pytest.raises(penstock.ReadError):
                _core.contents([f"{served.url}/{name}"], 1 << 20)


@pytest.mark.sampled(0)
def test_a_chunked_body_that_ends_early_is_no_file(tiny):
    """Each is asked for several times, with pauses: side by side."""
    content = tiny.read_bytes()
    told = part(Asked("/", {}), content, status="200 OK", chunked=50)
    shorter = [told[:-cut].replace(b"\r\n", b"\r\nConnection: close\r\n", 1) for cut in (1, 2, 6, 30, 100)]
    whole = part(Asked("/", {}), content[:-1], status="200 OK", chunked=50)

    def found(answer: bytes, look: Callable[[str], object]) -> BaseException | None:
        with raw_server(lambda asked: answer) as served:
            try:
                look(f"{served.url}/x.safetensors")
            except penstock.PenstockError as error:
                return error
        return None

    looks = (penstock.open, lambda address: _core.contents([address], 1 << 20))
    with ThreadPoolExecutor(11) as threads:
        early = [threads.submit(found, answer, look) for answer in shorter for look in looks]
        last = threads.submit(found, whole, penstock.open)
        assert [type(one.result()) for one in early] == [penstock.ReadError] * 10
        assert isinstance(last.result(), penstock.PenstockError)


def test_a_document_that_ends_with_its_connection_is_whole_if_it_parses():
    content = b'{"a": {"b": [1, 2, "}"]}}'
    with raw_server(lambda asked: part(asked, content, status="200 OK", length=False)) as served:
        assert _core.contents([f"{served.url}/config.json"], 1 << 20) == [content]


# Listings


@pytest.fixture
def objects(small: Path) -> dict[str, bytes]:
    return {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}


@pytest.mark.parametrize("odd", ["m//x", "m/raw//y/z.nc", "m//", "//", "m/./a", "m/../a", "m/a\tb"])
def test_obstore_429_multistore_116(objects, small, odd):
    with serving(Bucket(objects | {odd: b"?"})) as bucket:
        Oracle(small).same(penstock.open("s3://bucket/m/", storage=storage_of(bucket)).load(framework="np"))


def test_s3fs_770_aws_api_126(objects, small):
    """A folder and an object whose keys begin with a slash."""
    name = LAYOUT.files[0]
    with serving(Bucket({f"/test_path/{name}": objects[f"m/{name}"]})) as bucket:
        for address in (f"s3://bucket//test_path/{name}", "s3://bucket//test_path", "s3://bucket//test_path/"):
            checkpoint = penstock.open(address, storage=storage_of(bucket))
            Oracle(small / name).same(checkpoint.load(framework="np"))


@pytest.mark.parametrize("says_marker", [False, True])
def test_s3ninja_251_s3mock_144_mock_aws_s3_92(objects, small, says_marker):
    with serving(OldS3(objects)) as bucket:
        bucket.page, bucket.says_marker = 2, says_marker
        Oracle(small).same(penstock.open("s3://bucket/m/", storage=storage_of(bucket)).load(framework="np"))


def test_versitygw_770_minio_js_1314(objects, small):
    class Eager(Bucket):
        def listing(self, query):
            status, fields, body = super().listing(query)
            if b">false<" in body and b"<Contents>" in body:
                token = f"<NextContinuationToken>{max(self.objects)}</NextContinuationToken></ListBucketResult>"
                body = body.replace(b">false<", b">true<").replace(b"</ListBucketResult>", token.encode())
            return status, fields, body

    with serving(Eager(objects)) as bucket:
        Oracle(small).same(penstock.open("s3://bucket/m/", storage=storage_of(bucket)).load(framework="np"))


def test_s3cmd_730_aeroftp_122(objects):
    page = b"<!DOCTYPE HTML PUBLIC '-//W3C//DTD HTML 3.2 Final//EN'>\n<html>\n <head>\n  <title>Index of /</title>\n"
    with serving(Bucket(objects)) as bucket:
        bucket.script = lambda target, number: (200, {"Content-Type": "text/html"}, page)
        with pytest.raises(penstock.ReadError, match=r"web page \(Index of /\).*endpoint"):
            penstock.open("s3://bucket/m/", storage=storage_of(bucket))


# Redirects


@pytest.mark.parametrize("region", [None, "eu-central-1"])
def test_sccache_265_aws_sdk_ruby_133_snowflake_2900(objects, small, region):
    with serving(Resigned(objects, region or "us-east-1")) as there, serving(Bucket({})) as here:
        fields = {"x-amz-bucket-region": region} if region else {}
        text = "Please re-send this request to the specified temporary endpoint."
        here.script = lambda target, number: error(
            307, "TemporaryRedirect", text, Location=there.endpoint + target, **fields
        )
        Oracle(small).same(penstock.open("s3://bucket/m/", storage=storage_of(here)).load(framework="np"))


# Addresses


@pytest.mark.parametrize("kind", ["silent", "refusing"])
def test_racket_3941_fluux_messenger_532(small, kind):
    """In a namespace of its own, whose names have a dead address before the one that answers."""
    program = str(Path(__file__).parent.with_name("dead_address.py"))
    command = ["unshare", "--mount", "--net", sys.executable, program, str(small), kind]
    try:
        subprocess.run(["unshare", "--mount", "--net", "ip", "link"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespaces here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
