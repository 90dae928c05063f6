# ruff: noqa: F811
"""Engines' arguments with models at addresses: tests/engines has the engines' own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import penstock
import pytest
from penstock.integrations import _sglang_arguments
from penstock.integrations._vllm_arguments import install
from s3_server import Bucket
from test_fetched import FOLDER, KEY, SECRET, bucket, held, temporary  # noqa: F401
from test_s3 import nothing_in_the_environment  # noqa: F401


@dataclass
class Arguments:
    """Stands in for vLLM's: the fields that are read or changed."""

    model: str
    load_format: str = "penstock"
    tokenizer: str | None = None
    hf_config_path: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False
    served_model_name: str | None = None
    speculative_config: dict[str, Any] | None = None
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)

    def create_engine_config(self) -> dict[str, Any]:
        return vars(self).copy()

    create_model_config = create_engine_config


@pytest.fixture
def arguments() -> type[Arguments]:
    """A class of its own, with Penstock installed."""
    pytest.importorskip("torch")
    made = dataclass(type("Own", (Arguments,), {}))
    install(made)
    return made


@pytest.fixture
def extra(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the user gives the loader."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return {"storage": {"endpoint": bucket.endpoint}}


def test_arguments_get_a_folder_and_the_address_of_the_weights(arguments, bucket, extra, temporary):
    bucket.objects |= {f"d/{name.removeprefix('m/')}": content for name, content in bucket.objects.items()}
    bucket.objects["t/tokenizer.json"] = b"{}"
    draft = {"model": "s3://bucket/d", "num_speculative_tokens": 2}
    given = arguments(FOLDER, tokenizer="s3://bucket/t", speculative_config=draft, model_loader_extra_config=extra)
    made = given.create_engine_config()
    folder, other, tokenizer = made["model"], made["speculative_config"]["model"], made["tokenizer"]
    assert set(map(str, temporary.iterdir())) == {folder, other, tokenizer} and tokenizer != folder
    weights = {folder: FOLDER, other: "s3://bucket/d"}
    assert made == {
        **vars(arguments(folder)),
        "tokenizer": tokenizer,
        "served_model_name": FOLDER,
        "speculative_config": {**draft, "model": other},
        "model_loader_extra_config": {**extra, "weights": weights},
    }
    assert (draft["model"], "weights" in extra) == ("s3://bucket/d", False), "what the user gave is as it was"
    bucket.asked.clear()
    assert given.create_model_config() == made and bucket.asked == []


@pytest.mark.parametrize("change", [{"load_format": "auto"}, {"model": "org/name"}, {"model": "/models/m"}])
def test_other_arguments_are_as_they_were(arguments, temporary, change):
    given = {"model": FOLDER, **change}
    assert arguments(**given).create_engine_config() == vars(Arguments(**given))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"revision": "main"}, "revision='main': this is an address, which has none"),
        ({"code_revision": "main"}, f"^{FOLDER}: code_revision='main': "),
        ({"tokenizer_revision": "v1"}, f"^{FOLDER}: tokenizer_revision='v1': "),
        ({"tokenizer_revision": "v1", "tokenizer": "s3://bucket/t"}, "^s3://bucket/t: tokenizer_revision='v1': "),
        ({"speculative_config": {"model": "s3://bucket/d", "revision": "v2"}}, "^s3://bucket/d: revision='v2': "),
        ({"speculative_config": {"method": "mtp", "code_revision": "v2"}}, f"^{FOLDER}: code_revision='v2': "),
        ({"model_loader_extra_config": {"weights": "s3://bucket/other"}}, "weights='s3://bucket/other' is another"),
        ({"model_loader_extra_config": {"storage": {"secret_access_key": "x"}}}, "logs its arguments"),
        ({"model_loader_extra_config": "{sesame"}, "give an object of JSON"),
    ],
)
def test_arguments_that_cannot_be(arguments, bucket, extra, temporary, more, says):
    if "weights" in str(more):
        more = {"model_loader_extra_config": {**extra, **more["model_loader_extra_config"]}}
    with pytest.raises(penstock.InvalidError, match=says) as caught:
        arguments(FOLDER, **more).create_engine_config()
    assert "sesame" not in str(caught.value)


def test_a_revision_of_what_is_no_address_is_left_to_the_engine(arguments, bucket, extra, temporary):
    named = {
        "tokenizer": "org/tokenizer",
        "tokenizer_revision": "v1",
        "speculative_config": {"model": "org/draft", "revision": "v2"},
    }
    made = arguments(FOLDER, model_loader_extra_config=extra, **named).create_engine_config()
    assert {name: made[name] for name in named} == named


def test_where_the_interface_differs_addresses_are_an_error_and_nothing_else_is(temporary):
    own = dataclass(type("Own", (Arguments,), {"create_engine_config": None}))
    # What `vllm serve` makes is of a subclass, which was there before
    served = dataclass(type("Served", (own,), {}))
    install(own)
    for made in (own, served):
        for given in (made("/models/m"), made(FOLDER, load_format="auto")):
            assert given.create_model_config() == vars(given)
        with pytest.raises(penstock.UnsupportedError, match=r"lacks create_engine_config\): give a folder .* weights"):
            made(FOLDER).create_model_config()


def test_where_nothing_of_the_interface_is_left_arguments_with_addresses_cannot_be_made(temporary):
    after = {"__post_init__": lambda self: None, "create_engine_config": None, "create_model_config": None}
    own = dataclass(type("Own", (Arguments,), after))
    served = dataclass(type("Served", (own,), {}))
    install(own)
    for made in (own, served):
        assert made("/models/m").model == "/models/m"
        with pytest.raises(penstock.UnsupportedError, match="lacks create_engine_config, create_model_config"):
            made(FOLDER)


def test_arguments_of_sglang(bucket, extra, temporary):
    pytest.importorskip("torch")
    bucket.objects |= {f"d/{name.removeprefix('m/')}": content for name, content in bucket.objects.items()}

    def given(**more: Any) -> Any:
        plain = dict.fromkeys(("tokenizer_path", "revision", "served_model_name", "speculative_draft_model_path"))
        about = {"model_path": FOLDER, "trust_remote_code": False, "speculative_draft_model_revision": None}
        return SimpleNamespace(**plain | about | {"model_loader_extra_config": extra} | more)

    for config in (extra, json.dumps(extra)):
        made = _sglang_arguments._resolved(given(model_loader_extra_config=config))
        assert json.loads(made["model_loader_extra_config"]) == {**extra, "weights": {made["model_path"]: FOLDER}}
    draft = {"speculative_draft_model_path": "s3://bucket/d"}
    made = _sglang_arguments._resolved(given(**draft, speculative_draft_model_revision="main"))
    assert "config.json" in held(made["speculative_draft_model_path"])
    for more, says in (
        ({"revision": "v1"}, f"^{FOLDER}: revision='v1': this is an address"),
        ({**draft, "speculative_draft_model_revision": "v1"}, "^s3://bucket/d: speculative_draft_model_revision='v1'"),
        ({"model_loader_extra_config": "{sesame"}, "give an object of JSON"),
        ({"model_loader_extra_config": 3}, "give an object of JSON"),
    ):
        with pytest.raises(penstock.InvalidError, match=says) as caught:
            _sglang_arguments._resolved(given(**more))
        assert "sesame" not in str(caught.value)


def test_an_sglang_without_the_step_refuses_addresses():
    for load_format in ("penstock", "Penstock"):
        with pytest.raises(penstock.UnsupportedError, match="this SGLang is not one that Penstock knows"):
            _sglang_arguments.refuse(SimpleNamespace(load_format=load_format, model_path=FOLDER))
    _sglang_arguments.refuse(SimpleNamespace(load_format="auto", model_path=FOLDER))


@pytest.mark.parametrize(
    ("name", "is_weights"),
    [
        ("pytorch_model.bin", True),
        ("scalerless.bin", True),
        ("optimizerfree.pt", True),
        ("lr_scheduler.pt", False),
        ("model_optim_states.pt", False),
        ("training_args.bin", False),
        ("random_states_0.pt", False),
        (".optimizer.bin", False),
    ],
)
def test_only_pickles_of_weights_are_named_with_convert(tmp_path, name, is_weights):
    from penstock.integrations._pickles import naming_convert

    (tmp_path / name).write_bytes(b"")
    if not is_weights:
        with naming_convert(str(tmp_path), "vLLM"):
            return
    with pytest.raises(penstock.UnsupportedError, match="penstock convert"), naming_convert(str(tmp_path), "vLLM"):
        pass
