"""A checkpoint opened by a relative path loads after the program has changed its directory."""

import penstock
from conftest import Oracle, raw
from penstock.synthetic.synth import Tensor


def test_a_relative_path_means_the_directory_at_the_time_of_opening(write, tmp_path, monkeypatch):
    path = write(Tensor("weight", "F32", (8, 8)))
    monkeypatch.chdir(tmp_path)
    checkpoint = penstock.open(path.name)
    monkeypatch.chdir("/")
    assert checkpoint.files == [path.name]
    assert raw(checkpoint.load()["weight"]) == Oracle(path)["weight"]
