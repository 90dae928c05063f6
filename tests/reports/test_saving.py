"""Reports of users about other loaders: saving, converting, odd files. Each is put to Penstock as a small program.

The first verdict is what the program gave before anything was mended: "failed" or "right".

| report | symptom there | first verdict |
|---|---|---|
| safetensors#792 | no rename on mountpoint-s3 | failed |
| safetensors#787 | no ftruncate on HDFS | failed |
| safetensors#528 | a mapping is refused (ENOMEM) | failed |
| safetensors#545, #195 | a mapping is refused (ENODEV) | failed |
| safetensors#515, quanto#100, Automodel#1085 | tensor subclasses without memory | failed |
| TransformerEngine#1482 | extra state of a module | failed |
| transformers#28331, executorch#5030 | pickles before the zip format | failed |
| safetensors#414, webui#10014, diffusers#4406 | files that are not what their names say | failed |
| safetensors#668 | a header over 100 MB is called damaged | failed |
| diffusers#10280 | one descriptor for all readers of a gcsfuse file | failed |
| verl PR 7992 | HDFS: no ftruncate, and no rename either | failed |
| safetensors#842 | EOPNOTSUPP while saving to FUSE | failed |
| mountpoint-s3#506 | rename: function not implemented | failed |
| pmemfile#103 | fsync: invalid argument | failed |
| ms-swift#6493 | saving: invalid argument (os error 22) | failed |
| exllama#245 | unable to mmap 33 GB | failed |
| stable-diffusion-webui-docker#752, safetensors#485 | No such device (os error 19): a mount, a folder | right |
| smoothquant#13 | a pointer of Git LFS is unpickled: invalid load key 'v' | failed |
| diffusers#5328 | a web page is unpickled: invalid load key '<' | failed |
| sd-scripts#990 | a .ckpt: HeaderTooLarge | failed |
| diffusers#7782, IP-Adapter#332 | a safetensors file is given to torch.load | failed |
| unsloth#570 | mmap can only be used with the zip format | failed |
| ao#2230, transformers#27578 | invalid python storage, on saving quantized or TPU tensors | failed |
| optimum-quanto#165 | a string among the tensors of a state dict | right |
| GraphBAN#3 | an uninitialized parameter is saved | failed |
| gcsfuse#2828, hf-mount PR 19 | parallel reads on one handle are random, or take turns | failed |
"""

from __future__ import annotations

import errno
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ordeal
import penstock
import penstock.torch
import pytest
import refusing_fs
import slow_fs  # noqa: F401  (a condition names it)
import torch
from penstock._convert import convert
from torch import nn

STATE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
fuse = pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")
MOUNTPOINT = dict.fromkeys(("rename", "link", "chmod", "unlink", "ftruncate"), errno.EPERM)


def saved_to(folder: Path, fsync: bool = True, **how: Any) -> penstock.Report:
    """Saves to a file system that refuses, and reads the file back."""
    folder.mkdir(exist_ok=True)
    with refusing_fs.mounted(folder, **how) as fs:
        report = penstock.save_file(STATE, fs.path / "m.safetensors", fsync=fsync)
        assert fs.inside() == ["m.safetensors"]
    found = penstock.load_file(folder / "m.safetensors")
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)
    return report


@fuse
@pytest.mark.parametrize("fsync", [True, False])
def test_safetensors_792_and_mountpoint_s3_506(tmp_path: Path, fsync: bool):
    saved_to(tmp_path, fsync, source="mountpoint-s3", sequential=True, refuse=MOUNTPOINT | {"rename": errno.ENOSYS})


@fuse
def test_safetensors_787(tmp_path: Path):
    saved_to(tmp_path, refuse={"ftruncate": errno.ENOSYS})


@fuse
def test_verl_7992(tmp_path: Path):
    saved_to(
        tmp_path, sequential=True, refuse={"ftruncate": errno.ENOSYS, "rename": errno.ENOSYS, "link": errno.ENOSYS}
    )


@fuse
def test_safetensors_842(tmp_path: Path):
    for call in ("ftruncate", "rename", "fallocate", "chmod", "fsync"):
        saved_to(tmp_path / call, refuse={call: errno.EOPNOTSUPP})


@fuse
def test_pmemfile_103(tmp_path: Path):
    report = saved_to(tmp_path, refuse={"fsync": errno.EINVAL})
    assert [one["from"] for one in report.fallbacks] == ["fsync"]


@fuse
def test_ms_swift_6493(tmp_path: Path):
    for call in ("ftruncate", "rename", "fsync", "fallocate"):
        saved_to(tmp_path / call, refuse={call: errno.EINVAL})


def sparse(path: Path, nbytes: int) -> Path:
    big = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    head = json.dumps({"big": big, "w": {"dtype": "F32", "shape": [1], "data_offsets": [nbytes, nbytes + 4]}}).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + nbytes + 4)
    return path


def test_safetensors_528_and_exllama_245(tmp_path: Path, python: Callable[..., Any]):
    code = """
import resource, sys, penstock
checkpoint = penstock.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30))
print(checkpoint.load(names=["w"], framework="np")["w"].tolist())
"""
    assert python(code, sparse(tmp_path / "m.safetensors", 33 << 30)).stdout.strip() == "[0.0]"


def test_safetensors_545_and_195(small: Path, python: Callable[..., Any]):
    code = """
import errno, sys, penstock, refusals
refusals.refuse(refusals.Refusal("mmap", errno.ENODEV, argument=3, value=0x4002))
print(len(penstock.open(sys.argv[1]).load(framework="np")) > 3)
"""
    assert python(code, small, PYTHONPATH=str(Path(__file__).parent.parent)).stdout.strip() == "True"


@fuse
def test_webui_docker_752_and_safetensors_485(tmp_path: Path):
    penstock.save_file(STATE, tmp_path / "m.safetensors")
    with refusing_fs.mounted(tmp_path) as fs:
        assert torch.equal(penstock.load_file(fs.path / "m.safetensors")["w"], STATE["w"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(penstock.PenstockError, match="directory is empty"):
        penstock.open(tmp_path / "folder")


class Wrapped(torch.Tensor):
    """A tensor without memory, as quantized ones are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.data_ = data
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_"], None

    def dequantize(self) -> torch.Tensor:
        return self.data_.float()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_)
        raise NotImplementedError(func)


def fails(module: nn.Module, to: Path, *words: str) -> None:
    for save in (
        lambda: penstock.save(module, to),
        lambda: penstock.torch.save_model(module, to / "m.safetensors"),
        lambda: penstock.torch.save_file(module.state_dict(), to / "m.safetensors"),
    ):
        with pytest.raises(penstock.PenstockError) as caught:
            save()
        assert all(word in str(caught.value) for word in words), caught.value


def test_safetensors_515_quanto_100_automodel_1085_ao_2230_and_transformers_27578(tmp_path: Path):
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(Wrapped(torch.ones(2, 2, dtype=torch.int8)), requires_grad=False)
    fails(module, tmp_path, "weight", "Wrapped", "dequantize()", "data_")


def test_transformer_engine_1482(tmp_path: Path):
    class Layer(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1.0}

        def set_extra_state(self, state: Any) -> None: ...

    fails(nn.Sequential(Layer(2, 2)), tmp_path, "0._extra_state", "dict", "state.pop")


def test_graphban_3(tmp_path: Path):
    fails(nn.Sequential(nn.LazyLinear(2)), tmp_path, "0.weight", "UninitializedParameter", "Call the module once")


def test_optimum_quanto_165(tmp_path: Path):
    with pytest.raises(penstock.PenstockError, match=r"weight\.qtype is a str, not a torch\.Tensor"):
        penstock.torch.save_file(STATE | {"weight.qtype": "qint2"}, tmp_path / "m.safetensors")
    with pytest.raises(penstock.PenstockError, match=r"weight\.qtype is a str"):
        penstock.save(STATE | {"weight.qtype": "qint2"}, tmp_path)


def converted(source: Path, to: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        convert([str(source)], to, fsync=False, progress=False)
    found = penstock.open(to).load()
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_transformers_28331_executorch_5030_and_unsloth_570(tmp_path: Path):
    torch.save(STATE, tmp_path / "consolidated.00.pth", _use_new_zipfile_serialization=False)
    converted(tmp_path / "consolidated.00.pth", tmp_path / "to")


def test_safetensors_414_webui_10014_and_diffusers_4406(tmp_path: Path):
    for name in ("pytorch_lora_weights.bin", "deliberate.safetensors"):
        torch.save(STATE, tmp_path / name)
        with pytest.raises(penstock.NotACheckpointError, match="penstock convert"):
            penstock.open(tmp_path / name)
        converted(tmp_path / name, tmp_path / f"to {name}")


def test_sd_scripts_990(tmp_path: Path):
    around = {"epoch": 1, "global_step": 2, "pytorch-lightning_version": "1.4.2", "state_dict": STATE, "callbacks": {}}
    (tmp_path / "from").mkdir()
    torch.save(around, tmp_path / "from/model.ckpt", _use_new_zipfile_serialization=False)
    converted(tmp_path / "from/model.ckpt", tmp_path / "to")
    converted(tmp_path / "from", tmp_path / "folder")


def test_diffusers_7782_and_ip_adapter_332(tmp_path: Path):
    (tmp_path / "from").mkdir()
    penstock.save_file(STATE, tmp_path / "from/pytorch_model.bin", fsync=False)
    converted(tmp_path / "from", tmp_path / "to")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<html>login</html>", "web page"),
    ],
    ids=["smoothquant#13", "diffusers#5328"],
)
def test_smoothquant_13_and_diffusers_5328(tmp_path: Path, content: bytes, told: str):
    for name in ("opt-13b.pt", "pytorch_lora_weights.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(penstock.NotACheckpointError, match=told):
            convert([str(tmp_path / name)], tmp_path / "to")


def test_safetensors_668(tmp_path: Path):
    with (tmp_path / "m.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 120_000_000) + b"{}")
        file.truncate(8 + 120_000_000)
    with pytest.raises(penstock.HeaderError) as caught:
        penstock.open(tmp_path / "m.safetensors")
    assert "damaged" not in str(caught.value)


@fuse
def test_diffusers_10280_gcsfuse_2828_and_hf_mount_19(tmp_path: Path):
    ordeal.write(tmp_path / "model.safetensors", 32, 1 << 20)
    with refusing_fs.mounted(tmp_path) as fs:
        checkpoint = penstock.open(fs.path / "model.safetensors")
        found = checkpoint.load(framework="np", options={"threads": 8, "extent": 1 << 20, "cache": "keep"})
        assert isinstance(next(iter(found.values())), np.ndarray)
        told = fs.end()
    assert len({handle for handle, offset in told["reads"] if offset > 1 << 20}) > 1
