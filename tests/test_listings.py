"""Listings as servers write them: odd keys, pages that do not say how they go on, and answers that are none.

Each test runs against S3, Google Cloud Storage and Azure Blob Storage, as far as the protocol has it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import _core
from penstock.integrations import _fetched
from raw_server import Asked, part, raw_server
from s3_server import KEYS, Answer, Bucket, error, serving
from test_azure import ACCOUNT, Azure
from test_gcs import Google
from test_s3 import nothing_in_the_environment  # noqa: F401

KEY, SECRET = next(iter(KEYS.items()))
STORES: dict[str, type[Bucket]] = {"s3": Bucket, "gs": Google, "az": Azure}
#: What Amazon's and Google's listings have, and Azure's have not
TRUNCATED = ("s3", "gs")


def storage_of(bucket: Bucket) -> Any:
    if isinstance(bucket, Azure):
        bucket.public = True
        return {"endpoint": f"{bucket.endpoint}/{ACCOUNT}", "anonymous": True}
    if isinstance(bucket, Google):
        return {"endpoint": bucket.endpoint, "anonymous": True}
    return {"endpoint": bucket.endpoint, "access_key_id": KEY, "secret_access_key": SECRET}


@pytest.fixture(params=STORES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def bucket(small: Path, scheme: str) -> Iterator[Bucket]:
    objects = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    with serving(STORES[scheme](objects)) as bucket:
        bucket.page = 1000
        yield bucket


def is_listing(target: str) -> bool:
    query = dict(parse_qsl(urlsplit(target).query, keep_blank_values=True))
    return query.get("comp") == "list" or "delimiter" in query


# Keys are strings


ODD = [
    "m//", "m//x.safetensors", "m/./x", "m/../x", "m/.", "m/..", "m/a\tb.json.txt", "m/a\tb/c", "m/\n", "m/sub//deep",
    "m/%2e%2e", "m/<&>\"'", "m/ ", "m/+", "m/\u00e4", "/", "//m/", "./m", "..", "m", "m/\\", "m/a\x01b",
]  # fmt: skip


def test_odd_keys_beside_and_below_a_model_do_not_stop_its_listing(bucket, small, scheme):
    bucket.objects |= dict.fromkeys(ODD, b"")
    Oracle(small).same(penstock.open(f"{scheme}://bucket/m/", storage=storage_of(bucket)).load(framework="np"))
    names = _core.names_in(f"{scheme}://bucket/m/", None, storage_of(bucket))
    direct = {key[2:] for key in bucket.objects if key.startswith("m/") and "/" not in key[2:]}
    assert sorted(names) == sorted(direct - {"", ".", ".."})


def test_any_keys(bucket, small, scheme):
    """Generated: names that are empty, dots, tabs, escapes and the like, at every depth, in pages of any size."""
    parts = [
        "",
        ".",
        "..",
        "a",
        "\t",
        "a\tb",
        " ",
        "%2F",
        "+",
        "&amp;",
        "<",
        "\u00e4\u65e5",
        "x.txt",
        "m",
        "]]>",
        "&#9;",
    ]
    made = random.Random(35)
    model = dict(bucket.objects)
    for _ in range(25):
        keys = {"/".join(made.choices(parts, k=made.randint(1, 4))) for _ in range(made.randint(1, 40))}
        bucket.page = made.choice([1, 2, 3, 1000])
        bucket.objects = model | {made.choice(["", "m/", "m/"]) + key: b"" for key in keys}
        names = _core.names_in(f"{scheme}://bucket/m/", None, storage_of(bucket))
        direct = {key[2:] for key in bucket.objects if key.startswith("m/") and "/" not in key[2:]}
        assert sorted(names) == sorted(direct - {"", ".", ".."}), sorted(bucket.objects)
        assert [
            Path(file).name for file in penstock.open(f"{scheme}://bucket/m", storage=storage_of(bucket)).files
        ] == LAYOUT.files


def test_a_folder_whose_name_ends_with_slashes_is_another_folder(bucket, small, scheme, write):
    """The wrong weights would come without a word: both folders have a file of that name."""
    name = LAYOUT.files[0]
    other = (small / LAYOUT.files[1]).read_bytes()
    bucket.objects |= {f"m//{name}": other, f"/{name}": other, f"//{name}": bucket.objects[f"m/{name}"]}
    for folder, key in (("m//", f"m//{name}"), ("/", f"/{name}"), ("//", f"//{name}"), ("m///", None), ("m/", "m/")):
        address = f"{scheme}://bucket/{folder}"
        if key is None:
            with pytest.raises(penstock.NotFoundError):
                penstock.open(address, storage=storage_of(bucket))
            continue
        checkpoint = penstock.open(address, storage=storage_of(bucket))
        assert checkpoint.files[0].startswith(f"{scheme}://bucket/{key}")
        if key != f"//{name}":
            expected = small / LAYOUT.files[1] if bucket.objects.get(key) == other else small
            Oracle(expected).same(checkpoint.load(framework="np"))


def test_engines_fetch_from_the_folder_that_was_named(bucket, scheme, tmp_path, monkeypatch):
    monkeypatch.setattr(_fetched.tempfile, "tempdir", str(tmp_path))
    odd = ["m//", "m/..", "m/.", "m/x//y", "m/./config.json", "config.json"]
    bucket.objects |= dict.fromkeys(odd, b'{"from": "elsewhere"}')
    for folder in ("m/", "m//"):
        name = LAYOUT.files[0]
        bucket.objects[f"{folder}config.json"] = f'{{"from": "{folder}"}}'.encode()
        bucket.objects[f"{folder}{name}"] = bucket.objects[f"m/{name}"]
        fetched = _fetched.fetch(f"{scheme}://bucket/{folder}", storage_of(bucket))
        assert Path(fetched.folder, "config.json").read_text() == f'{{"from": "{folder}"}}'
    _fetched.remove_all()


# Pages


class WithoutTokens:
    """Listings that say that they go on, and give no token: what comes before them does not know version 2."""

    #: Whether it names the next key
    says_marker = False
    #: Whether it knows markers
    goes_on = True
    #: The order of its names
    reverse = False

    def listing(self: Any, query: Mapping[str, str]) -> Answer:
        prefix, after = query.get("prefix", ""), query.get("marker", "") if self.goes_on else ""
        with self.lock:
            self.listings += 1
        keys = [key for key in self.objects if key.startswith(prefix)]
        names = {key if "/" not in (rest := key[len(prefix) :]) else prefix + rest.split("/")[0] + "/" for key in keys}
        left = [name for name in sorted(names) if name > after]
        here, more = left[: self.page], len(left) > self.page
        here.sort(reverse=self.reverse)
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key></Contents>"
            if name in self.objects
            else f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in here
        )
        marker = f"<NextMarker>{escape(max(here))}</NextMarker>" if more and self.says_marker else ""
        body = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{marker}{contents}</ListBucketResult>"
        return 200, {}, body.encode()

    def answer(self: Any, method: str, target: str, fields: Mapping[str, str]) -> Answer:
        query = dict(parse_qsl(urlsplit(target).query))
        if "delimiter" in query:
            return self.listing(query)  # type: ignore[no-any-return]
        return super().answer(method, target, fields)  # type: ignore[misc,no-any-return]


class OldS3(WithoutTokens, Bucket):
    """S3 as it was."""


class OldGoogle(WithoutTokens, Google):
    """The same for Google Cloud Storage."""


@pytest.mark.parametrize("kind", [OldS3, OldGoogle])
@pytest.mark.parametrize("page", [1, 2, 3, 7])
@pytest.mark.parametrize("says_marker", [False, True])
def test_a_listing_that_goes_on_without_a_token_is_asked_for_in_the_older_way(small, kind, page, says_marker):
    objects = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    objects |= dict.fromkeys(["m/0/x", "m/a", "m/a&b", "m/b/c", "m/z/y", "m/zz"], b"")
    scheme = "gs" if kind is OldGoogle else "s3"
    with serving(kind(objects)) as bucket:
        bucket.page, bucket.says_marker = page, says_marker
        names = _core.names_in(f"{scheme}://bucket/m/", None, storage_of(bucket))
        assert sorted(names) == sorted([*LAYOUT.files, "a", "a&b", "zz"])
        Oracle(small).same(penstock.open(f"{scheme}://bucket/m", storage=storage_of(bucket)).load(framework="np"))


@pytest.mark.parametrize("kind", [OldS3, OldGoogle])
@pytest.mark.parametrize(
    ("goes_on", "reverse", "says"), [(False, False, "same page again"), (True, True, "and not where")]
)
def test_a_listing_that_cannot_be_asked_for_further_is_an_error(small, kind, goes_on, reverse, says):
    objects = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    with serving(kind(objects)) as bucket:
        bucket.page, bucket.goes_on, bucket.reverse = len(LAYOUT.files) - 1, goes_on, reverse
        scheme = "gs" if kind is OldGoogle else "s3"
        with pytest.raises(penstock.ReadError, match=f"{says}.*index.json") as caught:
            penstock.open(f"{scheme}://bucket/m/", storage=storage_of(bucket))
        assert caught.value.path == f"{scheme}://bucket/m/" and bucket.listings <= 3


def test_a_token_that_comes_again_is_an_error(bucket, scheme):
    if scheme == "az":
        body = "<EnumerationResults><Blobs/><NextMarker>t</NextMarker></EnumerationResults>"
    else:
        token = "<NextContinuationToken>t</NextContinuationToken>"
        body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>"
    bucket.script = lambda target, number: (200, {}, body.encode()) if is_listing(target) else None
    with pytest.raises(penstock.ReadError, match="same page again"):
        penstock.open(f"{scheme}://bucket/m/", storage=storage_of(bucket))
    assert len(bucket.asked) == 2


def test_pages_may_be_empty(bucket, scheme, small):
    """With a token, a page without names is no end."""
    answers = iter(("t1", "t2", None))

    def script(target: str, number: int) -> Answer | None:
        token = next(answers, None) if is_listing(target) else None
        if token is None:
            return None
        if scheme == "az":
            body = f"<EnumerationResults><Blobs /><NextMarker>{token}</NextMarker></EnumerationResults>"
        else:
            token = f"<NextContinuationToken>{token}</NextContinuationToken>"
            body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>"
        return 200, {}, body.encode()

    bucket.script = script
    # The last page begins behind "t2", where nothing is
    bucket.objects = {f"z/{key[2:]}": content for key, content in bucket.objects.items()}
    Oracle(small).same(penstock.open(f"{scheme}://bucket/z/", storage=storage_of(bucket)).load(framework="np"))


# Answers that are none


@pytest.mark.parametrize(
    ("told", "kind", "says"),
    [
        ((200, {}, b"<!DOCTYPE html><html><title>Sign in to Storage</title></html>"), penstock.ReadError,
         r"a web page \(Sign in to Storage\)"),
        ((200, {}, b"<html><body>Index of /</body></html>"), penstock.ReadError, r"a web page \(Index of /\)"),
        ((200, {}, b"<Error><Code>InternalError</Code><Message>We failed</Message></Error>"), penstock.ReadError,
         "InternalError: We failed"),
        ((200, {}, b"<Error><Code>AccessDenied</Code><Message>Not you</Message></Error>"), penstock.AccessError,
         "AccessDenied: Not you"),
        ((200, {}, b"<Error><Code>NoSuchBucket</Code><Message>None</Message></Error>"), penstock.NotFoundError,
         "NoSuchBucket: None"),
        ((200, {}, b"<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>"), penstock.ReadError,
         "endpoint right"),
        ((200, {}, b'{"message": "no such route"}'), penstock.ReadError, "no such route"),
        ((200, {}, b""), penstock.ReadError, "answers a listing with nothing"),
        ((200, {}, b"<ListBucketResult><Contents><Key>m/a"), penstock.ReadError, "breaks off"),
        ((400, {}, b"Bucket names have no upper case"), penstock.ReadError, "Bucket names have no upper case"),
        ((400, {}, b"<html><title>400 The plain request was sent to an HTTPS port</title>"), penstock.ReadError,
         "The plain request was sent to an HTTPS port"),
        ((403, {}, b'{"errors": [{"message": "quota is over"}]}'), penstock.AccessError, "quota is over"),
        ((404, {}, b"no bucket of this name"), penstock.NotFoundError, "no bucket of this name"),
        ((501, {}, b"listing is not implemented"), penstock.ReadError, "listing is not implemented"),
    ],
)  # fmt: skip
def test_what_is_no_listing_is_told(bucket, scheme, told, kind, says):
    bucket.script = lambda target, number: told
    with pytest.raises(kind, match=says) as caught:
        penstock.open(f"{scheme}://bucket/m/", storage=storage_of(bucket))
    assert caught.value.path == f"{scheme}://bucket/m/"
    # The same words where an object was asked for
    if told[0] >= 400:
        with pytest.raises(kind, match=says):
            penstock.open(f"{scheme}://bucket/m/x.safetensors", storage=storage_of(bucket))


def test_a_plain_text_shows_no_query_of_an_address(bucket, scheme):
    """What a server repeats of the request may be what allows access."""
    bucket.script = lambda target, number: (400, {}, f"cannot do {target}?X-Amz-Signature=sesame".encode())
    for address in (f"{scheme}://bucket/m/", f"{scheme}://bucket/m/x.safetensors"):
        with pytest.raises(penstock.ReadError, match="cannot do") as caught:
            penstock.open(address, storage=storage_of(bucket))
        assert not re.search("sesame|list-type|sig=", repr(caught.value))


@pytest.mark.parametrize("size", [9, 8, 10])
def test_a_listing_says_where_an_object_ends_that_ends_with_its_connection(size):
    """Nothing else does, of a plain text without a length."""
    content = f"<Contents><Key>m/merges.txt</Key><Size>{size}</Size></Contents>"
    listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{content}</ListBucketResult>".encode()

    def answer(asked: Asked) -> bytes:
        if is_listing(asked.target):
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(listing), listing)
        return part(asked, b"nine byte", status="200 OK", length=False)

    with raw_server(answer) as served:
        storage: Any = {"endpoint": served.url, "anonymous": True}
        with pytest.raises(penstock.ReadError, match="so bytes may be missing"):
            _core.contents(["s3://bucket/m/merges.txt"], 1 << 20, None, storage)
        assert _core.names_in("s3://bucket/m/", None, storage) == ["merges.txt"]
        if size == 9:
            assert _core.contents(["s3://bucket/m/merges.txt"], 1 << 20, None, storage) == [b"nine byte"]
            return
        with pytest.raises(penstock.ReadError, match="so bytes may be missing"):
            _core.contents(["s3://bucket/m/merges.txt"], 1 << 20, None, storage)


# Redirects


class Resigned(Bucket):
    """It takes signed requests alone, and knows where it is."""

    def answer(self, method: str, target: str, fields: Mapping[str, str]) -> Answer:
        if "authorization" not in fields:
            self.asked.append((target, None))
            return error(403, "AccessDenied", "who are you?")
        return super().answer(method, target, fields)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("region", [None, "eu-south-2"])
@pytest.mark.parametrize("token", [None, "a.session/token=="])
def test_a_redirect_of_s3_is_signed_for_the_place_that_it_names(small, big, status, region, token):
    objects = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    with serving(Resigned(objects, region or "us-east-1")) as there, serving(Bucket({})) as here:
        fields = {"x-amz-bucket-region": region} if region else {}
        here.script = lambda target, number: error(
            status, "TemporaryRedirect", "Please re-send this request", Location=there.endpoint + target, **fields
        )
        storage = storage_of(here) | ({"session_token": token} if token else {})
        checkpoint = penstock.open("s3://bucket/m/", storage=storage)
        Oracle(small).same(checkpoint.load(framework="np"))
        assert there.asked and all(key == KEY for _, key in there.asked)


@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_of_s3_may_name_nothing_but_the_host_that_has_the_bucket(small, big, status):
    objects = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    with serving(Resigned(objects)) as there, serving(Bucket({})) as here:
        host = there.endpoint.removeprefix("http://")
        here.script = lambda target, number: error(status, "Moved", "", f"<Endpoint>{host}</Endpoint>")
        checkpoint = penstock.open("s3://bucket/m/", storage=storage_of(here))
        Oracle(small).same(checkpoint.load(framework="np"))
        assert there.asked and all(key == KEY for _, key in there.asked)


def test_a_redirect_to_another_region_that_it_does_not_name_is_corrected(small):
    objects = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    with serving(Resigned(objects, "ap-east-1")) as there, serving(Bucket({})) as here:
        here.script = lambda target, number: error(307, "TemporaryRedirect", "", Location=there.endpoint + target)
        checkpoint = penstock.open(f"s3://bucket/m/{LAYOUT.files[0]}", storage=storage_of(here))
        Oracle(small / LAYOUT.files[0]).same(checkpoint.load(framework="np"))
        assert len(here.asked) <= 6


def test_a_redirect_of_s3_to_an_address_with_a_signature_of_its_own_gets_no_other(small):
    objects = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    with serving(Bucket(objects)) as there, serving(Bucket({})) as here:
        signed = "?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=0123"
        here.script = lambda target, number: error(307, "x", "", Location=there.endpoint + target + signed)
        checkpoint = penstock.open(f"s3://bucket/m/{LAYOUT.files[0]}", storage=storage_of(here))
        Oracle(small / LAYOUT.files[0]).same(checkpoint.load(framework="np"))
        assert {key for _, key in there.asked} == {None}


def test_redirects_without_end_are_an_error(bucket, scheme):
    bucket.script = lambda target, number: (307, {"Location": target}, b"")
    for address in (f"{scheme}://bucket/m/", f"{scheme}://bucket/m/x.safetensors"):
        with pytest.raises(penstock.ReadError, match="redirects more than 5 times"):
            penstock.open(address, storage=storage_of(bucket))
    assert len(bucket.asked) <= 12
