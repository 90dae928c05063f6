"""`Checkpoint.stream`: order, read-ahead, and every way to stop early."""

import contextlib
import gc
import random
import threading
from pathlib import Path

import penstock
import pytest
import torch
from conftest import LAYOUT, Oracle, raw


def quiet():
    """Number of this process' threads."""
    return threading.active_count(), len(list(Path("/proc/self/task").iterdir()))


def test_a_stream_gives_every_tensor_once_in_file_order(small):
    arrived = list(penstock.open(small).stream())
    assert len(arrived) == len(LAYOUT.tensors)
    Oracle(small).same(dict(arrived))


def test_layer_order_groups_layers_across_files(small):
    names = [name for name, _ in penstock.open(small).stream(order="layer")]
    assert sorted(names) == sorted(t.name for t in LAYOUT.tensors)
    layers = [name.split(".")[1] for name in names if name.startswith("layers.")]
    assert layers == sorted(layers)


@pytest.mark.parametrize("framework", ["np", "dlpack"])
def test_a_stream_serves_every_framework(small, framework):
    if framework == "np":
        pytest.importorskip("ml_dtypes")
    Oracle(small).same(dict(penstock.open(small).stream(framework=framework)))


@pytest.mark.parametrize("window", [1, "1MiB", 1 << 30])
def test_keeping_every_tensor_of_a_small_window_does_not_deadlock(big, window):
    Oracle(big).same(dict(penstock.open(big).stream(window=window, options={"copy": True})))


def test_a_tensor_is_not_overwritten_by_the_next_ones(big):
    oracle = Oracle(big)
    stream = penstock.open(big).stream(window=1, options={"copy": True})
    name, first = next(stream)
    for _ in stream:
        pass
    assert raw(first) == oracle[name]


def test_a_stream_casts_and_cuts(opened):
    name = "layers.0.attn.weight"
    [(got, tensor)] = opened.stream(names=name, slices={name: slice(0, 4)}, dtype="float16")
    assert (got, tuple(tensor.shape), tensor.dtype) == (name, (4, 40), torch.float16)


def test_arguments_are_checked_before_the_first_tensor_is_asked_for(opened):
    with pytest.raises(penstock.UnknownTensorError):
        opened.stream(names="nope")
    with pytest.raises(ValueError, match="layer"):
        opened.stream(order="random")
    with pytest.raises(ValueError, match="window"):
        opened.stream(window="wide")


def test_a_stream_that_is_never_started_starts_nothing(big):
    before = quiet()
    stream = penstock.open(big).stream()
    assert quiet() == before
    del stream


@pytest.mark.parametrize("how", ["close", "drop", "closing", "exception"])
def test_stopping_early_leaves_nothing_running(big, how):
    penstock.open(big).load(names="layers.0.weight", options={"copy": True})  # threads that live for the process
    before = quiet()
    stream = penstock.open(big).stream(window="8MB", options={"copy": True})
    if how == "closing":
        with contextlib.closing(stream):
            next(stream)
    elif how == "exception":
        try:
            for _ in stream:
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        del stream
    else:
        next(stream)
        if how == "close":
            stream.close()
        else:
            del stream
    gc.collect()
    assert quiet()[0] == before[0]
    assert quiet()[1] <= before[1] + 1  # a worker of the process' pool may be the one thread more


def test_a_stream_can_be_stopped_and_another_one_started(big):
    checkpoint = penstock.open(big)
    for _ in range(5):
        stream = checkpoint.stream(window="8MB", options={"copy": True})
        next(stream)
        stream.close()
    Oracle(big).same(dict(checkpoint.stream(window="8MB")))


def test_a_load_inside_a_stream_does_not_deadlock(big):
    checkpoint = penstock.open(big)
    oracle = Oracle(big)
    for name, tensor in checkpoint.stream(window=1, options={"copy": True, "staging": "16MiB"}):
        inner = checkpoint.load(names=name, options={"copy": True, "staging": "16MiB"})[name]
        assert raw(inner) == raw(tensor) == oracle[name]


def test_a_stream_reports_when_it_is_done(opened):
    for _ in opened.stream():
        assert opened.last_report is None
    assert opened.last_report.nbytes == LAYOUT.nbytes


def test_a_stream_may_be_taken_up_by_another_thread(small):
    stream = penstock.open(small).stream()
    first = dict([next(stream)])
    rest = {}
    thread = threading.Thread(target=lambda: rest.update(stream))
    thread.start()
    thread.join()
    Oracle(small).same(first | rest)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("window", [1, "1MiB", 1 << 30])
def test_listed_names_come_in_the_order_of_the_list(big, window, copy):
    checkpoint, chance = penstock.open(big), random.Random(7)
    oracle, options = Oracle(big), {"copy": copy}
    names = list(checkpoint)
    for given in (names, names[::-1], names[1::2] + names[::2], chance.sample(names, len(names) // 2)):
        arrived = [
            (name, raw(tensor)) for name, tensor in checkpoint.stream(names=given, window=window, options=options)
        ]
        assert [name for name, _ in arrived] == given
        assert all(content == oracle[name] for name, content in arrived)
    with penstock.safe_open(big) as opened:
        assert [name for name, _ in opened.tensors(names[::-1])] == names[::-1]
        assert [name for name, _ in opened.tensors([*names[5:7], "*"])][:2] == names[5:7]


def test_globs_functions_and_layers_keep_the_order_of_the_files(small):
    checkpoint = penstock.open(small)
    names = [name for name, _ in checkpoint.stream()]
    assert [name for name, _ in checkpoint.stream(names="*")] == names
    assert [name for name, _ in checkpoint.stream(names=lambda name: True)] == names
    assert [name for name, _ in checkpoint.stream(names=["layers.1.*", "layers.0.*"])] == [
        *(name for name in names if name.startswith("layers.1.")),
        *(name for name in names if name.startswith("layers.0.")),
    ]
    by_layer = [name for name, _ in checkpoint.stream(order="layer")]
    assert [name for name, _ in checkpoint.stream(names=names[::-1], order="layer")] == by_layer


def test_listed_names_are_read_ahead_no_further_than_the_window(big):
    checkpoint = penstock.open(big)
    names = list(checkpoint)[::-1]
    for name, tensor in checkpoint.stream(names=names, window="4MiB", options={"copy": True, "io": "threads"}):
        assert raw(tensor) == Oracle(big)[name]
    report = checkpoint.last_report
    assert report is not None
    assert report.nbytes == checkpoint.nbytes


def test_listed_slices_and_casts_come_in_the_order_of_the_list(opened):
    names = [name for name in opened if name.endswith("attn.weight")][::-1]
    slices = {name: ([slice(0, 2), slice(4, 6)], slice(None)) for name in names[::2]}
    arrived = list(opened.stream(names=names, slices=slices, dtype="float16"))
    assert [name for name, _ in arrived] == names
    expected = opened.load(names=names, slices=slices, dtype="float16")
    assert all(raw(tensor) == raw(expected[name]) for name, tensor in arrived)
