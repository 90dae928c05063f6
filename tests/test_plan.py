"""`Checkpoint.plan` and `penstock plan`: what ranks read and send, against arithmetic by hand and against loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch.distributed as dist
from penstock._cut import Cut, Parallel, dimension
from penstock._plan import Plan
from penstock._report import size_text
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Tensor
from test_web import serving

MIB = 1 << 20
PAGE = 4096


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> penstock.Checkpoint:
    """Two matrices of 4 MiB; the data begin at a page."""
    path = tmp_path_factory.mktemp("plan") / "model.safetensors"
    tensors = [Tensor("v", "BF16", (512, 4096)), Tensor("w", "BF16", (512, 4096))]
    return penstock.open(synth.write_file(path, tensors, align=PAGE))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> penstock.Checkpoint:
    folder = tmp_path_factory.mktemp("llama")
    synth.write(layouts.build("llama-3-8b", scale=0.001, layers=6), folder)
    return penstock.open(folder)


def test_replicas_read_a_part_each_and_exchange_the_rest(two: penstock.Checkpoint) -> None:
    plan = two.plan([None] * 4, nodes=2)
    assert plan.alone_bytes == 4 * 8 * MIB and plan.together_bytes == 8 * MIB
    for number, rank in enumerate(plan.ranks):
        assert rank == {
            "rank": number,
            "node": number // 2,
            "wanted_bytes": 8 * MIB,
            "together_bytes": 2 * MIB,
            "together_unwanted_bytes": 0,
            "reads": 2,
            "parcels": 2,
            "sent_bytes": 6 * MIB,
            "received_bytes": 6 * MIB,
            "alone_bytes": 8 * MIB,
            "alone_unwanted_bytes": 0,
            "alone_reads": 2,
        }
    crossing = {"sent_bytes": 8 * MIB, "received_bytes": 8 * MIB}
    assert plan.nodes == [{"together_bytes": 4 * MIB, "alone_bytes": 16 * MIB, **crossing}] * 2
    assert json.loads(json.dumps(plan)) == plan


def test_within_nodes_each_node_reads_what_its_ranks_want(two: penstock.Checkpoint) -> None:
    plan = two.plan([None] * 5, nodes=[0, 0, 1, 1, 2], scope="node")
    assert [rank["together_bytes"] for rank in plan.ranks] == [4 * MIB] * 4 + [8 * MIB]
    assert [rank["sent_bytes"] for rank in plan.ranks] == [4 * MIB] * 4 + [0]
    assert [(node["together_bytes"], node["sent_bytes"]) for node in plan.nodes] == [(8 * MIB, 0)] * 3
    with pytest.raises(penstock.InvalidError, match="'world', 'node'"):
        two.plan([None], scope="rack")  # type: ignore[arg-type]


def test_columns_bring_their_neighbours_unless_ranks_exchange(two: penstock.Checkpoint) -> None:
    halves = [{"w": (slice(None), slice(2048 * rank, 2048 * (rank + 1)))} for rank in range(2)]
    plan = two.plan(halves, nodes=[7, 3])
    for rank in plan.ranks:
        assert (rank["wanted_bytes"], rank["together_bytes"], rank["received_bytes"]) == (2 * MIB, 2 * MIB, MIB)
        assert rank["alone_bytes"] == 4 * MIB - PAGE  # from the first wanted half row to the last one
        assert (rank["alone_unwanted_bytes"], rank["together_unwanted_bytes"]) == (2 * MIB - PAGE, 0)
    assert (plan.alone_unwanted_bytes, plan.together_unwanted_bytes) == (4 * MIB - 2 * PAGE, 0)
    assert "ranks receive 4.19 MB that they do not want" in plan.unwanted() and str(plan).endswith(plan.unwanted())
    assert 'exchange="on" (PENSTOCK_EXCHANGE=on)' in plan.unwanted() and "leaves 0 B" in plan.unwanted()
    assert [rank["node"] for rank in plan.ranks] == [1, 0]


def test_columns_that_nobody_wants_are_unwanted_together_too(two: penstock.Checkpoint) -> None:
    """Of three quarters; two ranks want the same one."""
    quarters = [{"w": (slice(None), slice(1024 * at, 1024 * (at + 1)))} for at in (0, 1, 1)]
    plan = two.plan([*quarters[:2], {**quarters[2], "v": slice(0, 1)}])
    assert plan.together_bytes - plan.together_unwanted_bytes == 2 * MIB + 2 * PAGE
    assert plan.together_unwanted_bytes == 2 * MIB - PAGE  # not the last half of the last row
    within = two.plan(quarters, nodes=[0, 1, 1], scope="node")
    assert [rank["alone_unwanted_bytes"] > 2 * MIB for rank in within.ranks] == [True] * 3
    # Nobody of the first node reads for that rank, and no option ends it
    alone = two.plan(quarters[:1])
    assert alone.together_unwanted_bytes == alone.alone_unwanted_bytes > 0
    assert "do not want" in alone.unwanted() and "exchange" not in alone.unwanted()
    assert two.plan([None, None]).unwanted() == ""


def test_what_a_rank_wants_alone_is_not_exchanged(two: penstock.Checkpoint) -> None:
    plan = two.plan([{"v": None}, {"w": slice(None)}, {}])
    assert [rank["together_bytes"] for rank in plan.ranks] == [4 * MIB, 4 * MIB, 0]
    assert plan.alone_bytes == plan.together_bytes == 8 * MIB and plan.sent_bytes == 0
    assert len(plan.nodes) == 1


@pytest.mark.parametrize(
    ("rates", "alone", "together"),
    [
        ({"storage_rate": MIB}, (32, "storage"), (8, "storage")),
        ({"storage_rate": 8 * MIB, "node_rate": MIB}, (16, "node"), (4, "node")),
        ({"storage_rate": 8 * MIB, "network": MIB}, (4, "storage"), (8, "network")),
        ({}, (None, None), (None, None)),
    ],
)
def test_the_slowest_part_bounds_the_time(two: penstock.Checkpoint, rates: Any, alone: Any, together: Any) -> None:
    times = two.plan([None] * 4, nodes=2).seconds(**rates)
    assert {way: (found["seconds"], found["bound"]) for way, found in times.items()} == {
        "alone": alone,
        "together": together,
    }


def test_what_cannot_be_planned_is_refused(two: penstock.Checkpoint) -> None:
    with pytest.raises(penstock.UnknownTensorError, match="u"):
        two.plan([{"u": None}])
    with pytest.raises(penstock.SliceError, match="outside"):
        two.plan([{"v": slice(0, 513)}])
    with pytest.raises(penstock.InvalidError, match="empty"):
        two.plan([])
    for nodes in (0, 3, [0]):
        with pytest.raises(penstock.InvalidError, match="nodes"):
            two.plan([None, None], nodes=nodes)
    for wants in ({"v": None}, "v", [["v"]], None):
        with pytest.raises(TypeError, match="wants"):
            two.plan(wants)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nodes"):
        two.plan([None], nodes="1")  # type: ignore[arg-type]
    with pytest.raises(penstock.InvalidError, match="storage_rate"):
        two.plan([None]).seconds(storage_rate=0)
    with pytest.raises(AttributeError, match="together_bytes"):
        _ = two.plan([None]).bytes


def loaded(checkpoint: penstock.Checkpoint, wants: list[Any], options: dict[str, Any], together: bool) -> list[Any]:
    """The reports of the loads of these ranks."""
    store = dist.HashStore()

    def load(rank: int) -> Any:
        opened = penstock.open(checkpoint.files)
        slices = {name: part for name, part in wants[rank].items() if part is not None}
        group = (store, rank, len(wants)) if together else None
        opened.load(names=list(wants[rank]), slices=slices, group=group, options=options, progress=False)
        return opened.last_report

    with ThreadPoolExecutor(len(wants)) as pool:
        return list(pool.map(load, range(len(wants))))


@pytest.mark.parametrize(
    "parallel", [Parallel(dp=3), Parallel(tp=4), Parallel(tp=2, pp=2), Parallel(tp=2, dp=2), Parallel(pp=3)], ids=str
)
def test_loads_read_and_exchange_what_was_planned(llama: penstock.Checkpoint, parallel: Parallel) -> None:
    cut = Cut(llama.values(), parallel)
    wants = [cut.wants(rank) for rank in range(parallel.ranks)]
    plan = llama.plan(wants)
    reports = loaded(llama, wants, {"cache": "bypass", "copy": True, "exchange": "on"}, True)
    for rank, report in zip(plan.ranks, reports, strict=True):
        assert report.nbytes == rank["wanted_bytes"]
        assert report.exchange["sent_bytes"] == rank["sent_bytes"]
        assert report.exchange["received_bytes"] == rank["received_bytes"]
    assert plan.sent_bytes > 0 or parallel.tp * parallel.dp == 1


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> penstock.Checkpoint:
    folder = tmp_path_factory.mktemp("experts")
    synth.write(layouts.build("qwen3-30b-a3b", scale=0.005, layers=1), folder)
    return penstock.open(folder)


@pytest.mark.parametrize("model", ["llama", "experts"])
def test_eight_ranks_read_in_vain_what_was_planned(model: str, request: pytest.FixtureRequest) -> None:
    checkpoint: penstock.Checkpoint = request.getfixturevalue(model)
    wants = [Cut(checkpoint.values(), Parallel(tp=8)).wants(rank) for rank in range(8)]
    plan = checkpoint.plan(wants)
    past: dict[str, Any] = {"io": "direct", "cache": "bypass", "copy": True, "gap": 16 << 10}
    for way, more in ("alone", {}), ("together", {"exchange": "on"}):
        reports = loaded(checkpoint, wants, past | more, way == "together")
        for rank, report in zip(plan.ranks, reports, strict=True):
            assert report.nbytes == rank["wanted_bytes"]
            # In CPU memory an extent may end a page earlier or later than in a slab
            read, most = report.routes["direct"]["bytes"], 0.002 * rank[f"{way}_bytes"]
            assert read == pytest.approx(rank[f"{way}_bytes"], abs=most)
            assert report.slack_bytes + report.gap_bytes == pytest.approx(rank[f"{way}_unwanted_bytes"], abs=most)
            assert read - report.slack_bytes - report.gap_bytes == rank[f"{way}_bytes"] - rank[f"{way}_unwanted_bytes"]
    assert plan.alone_unwanted_bytes > plan.together_unwanted_bytes


def test_from_a_server_ranks_receive_what_was_planned(tmp_path: Path) -> None:
    """A gap of more than 16 KiB is skipped on a disk. A server's gaps of up to 1 MiB are not."""
    synth.write_file(tmp_path / "model.safetensors", [Tensor("down_proj.weight", "BF16", (512, 16384))], align=PAGE)
    with serving(tmp_path) as web:
        checkpoint = penstock.open(web("model.safetensors"))
        wants: list[Any] = [{"down_proj.weight": (slice(None), slice(2048 * n, 2048 * (n + 1)))} for n in range(8)]
        plan = checkpoint.plan(wants)
        assert plan.wanted_bytes == plan.together_bytes == 16 * MIB and plan.together_unwanted_bytes == 0
        assert plan.alone_unwanted_bytes > 6 * plan.wanted_bytes
        assert penstock.open(tmp_path).plan(wants).alone_unwanted_bytes == 0
        for rank, report in zip(plan.ranks, loaded(checkpoint, wants, {"copy": True}, False), strict=True):
            assert report.network["received_bytes"] - report.network["gap_bytes"] == rank["alone_bytes"]
            assert report.gap_bytes == rank["alone_unwanted_bytes"]
        for rank, report in zip(plan.ranks, loaded(checkpoint, wants, {"exchange": "on"}, True), strict=True):
            assert report.network["received_bytes"] == rank["together_bytes"]


# --- the rule of `penstock plan` ---


def info(name: str, *shape: int) -> penstock.TensorInfo:
    return penstock.TensorInfo(name, "BF16", shape, 0, "", (0, 0))


@pytest.mark.parametrize(
    ("name", "shape", "along"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), 0),
        ("model.layers.0.self_attn.q_proj.bias", (8,), 0),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8), 1),
        ("model.layers.0.self_attn.o_proj.bias", (8,), None),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", (4, 4), 1),
        ("model.layers.0.input_layernorm.weight", (8,), None),
        ("model.layers.0.mlp.gate.weight", (8, 8), None),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (8, 8), 0),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", (4, 8, 8, 16), 1),
        ("model.layers.0.mlp.experts.down_proj_blocks", (4, 8, 8, 16), 2),
        ("model.layers.0.mlp.experts.down_proj_bias", (4, 8), None),
        ("model.embed_tokens.weight", (8, 8), 0),
        ("transformer.h.0.self_attention.dense.weight", (8, 8), 1),
        ("encoder.layer.0.attention.output.dense.weight", (8, 8), 1),
        ("encoder.layer.0.intermediate.dense.weight", (8, 8), 0),
        ("h.0.attn.c_attn.weight", (8, 24), 1),
        ("h.0.attn.c_attn.bias", (24,), 0),
        ("h.0.attn.c_proj.weight", (8, 8), 0),
        ("h.0.attn.c_proj.bias", (8,), None),
        ("scalar", (), None),
    ],
)
def test_matrices_are_divided_along_what_megatron_divides(name: str, shape: Any, along: int | None) -> None:
    assert dimension(info(name, *shape)) == along


@pytest.mark.parametrize("parallel", [Parallel(2, 2, 2), Parallel(4, 2, 1, 4), Parallel(2, 1, 4, 8)], ids=str)
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt2"])
def test_the_ranks_of_a_replica_have_everything(model: str, parallel: Parallel) -> None:
    layout = layouts.build(model, layers=4)
    tensors = [info(tensor.name, *tensor.shape) for tensor in layout.tensors]
    cut, all_names = Cut(tensors, parallel), {tensor.name for tensor in tensors}
    names: set[str] = set()
    wants_of = [cut.wants(rank) for rank in range(parallel.ranks)]
    for tensor in tensors:
        elements: set[tuple[int, ...]] = set()
        whole = False
        for wants in wants_of:
            if tensor.name in wants:
                names.add(tensor.name)
                part = wants[tensor.name]
                whole |= part is None
                if part is not None:
                    elements.update((len(part) - 1, at) for at in range(*part[-1].indices(tensor.shape[len(part) - 1])))
        assert whole or len(elements) == tensor.shape[next(iter(elements))[0]], tensor.name
    assert names == all_names


def test_stages_have_layers_in_order_and_experts_are_whole_with_ep() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in range(5) for e in range(8)]
    tensors = [info(name, 4, 4) for name in ["model.embed_tokens.weight", *names, "lm_head.weight"]]
    cut = Cut(tensors, Parallel(tp=2, pp=2, dp=2, ep=4))
    assert [cut.stage(f"model.layers.{layer}.x.weight") for layer in range(5)] == [0, 0, 0, 1, 1]
    assert (cut.stage("model.embed_tokens.weight"), cut.stage("lm_head.weight")) == (0, 1)
    # Ranks along tp, then pp, then dp: 0, 1, 4 and 5 have the first stage
    of_layer = [{name for name in cut.wants(rank) if ".layers.0." in name} for rank in (0, 1, 4, 5)]
    assert [sorted(name.split(".")[5] for name in found) for found in of_layer] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
        ["6", "7"],
    ]
    assert all(cut.wants(0)[name] is None for name in of_layer[0])
    assert cut.wants(0)["model.embed_tokens.weight"] == (slice(0, 2),)


@pytest.mark.parametrize(
    ("parallel", "why"), [(Parallel(pp=7), "pp"), (Parallel(tp=2, ep=3), "ep"), (Parallel(tp=0), "tp")]
)
def test_ranks_that_do_not_fit_the_model_are_refused(parallel: Parallel, why: str) -> None:
    with pytest.raises(penstock.InvalidError, match=why):
        Cut([info("h.0.attn.c_attn.weight", 4, 4)], parallel)


# --- the command ---


def test_the_command_says_what_the_plan_says(
    llama: penstock.Checkpoint, cli: Callable[..., Any], tmp_path: Path
) -> None:
    folder = str(Path(llama.files[0]).parent)
    shape = ["--tp", "2", "--pp", "2", "--dp", "2", "--nodes", "4"]
    rates = ["--storage-rate", "100MB/s", "--network", "1GB/s"]
    found = cli("plan", folder, *shape, *rates, "--json")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    cut = Cut(llama.values(), Parallel(2, 2, 2))
    plan = llama.plan([cut.wants(rank) for rank in range(8)], nodes=4)
    assert {key: said[key] for key in plan} == plan
    assert said["times"] == plan.seconds(storage_rate=100e6, network=1e9)
    assert said["parallel"] == {"tp": 2, "pp": 2, "dp": 2, "ep": 1} and said["quicker"] == "together"
    text = cli("plan", folder, *shape, *rates).stdout
    assert "together is quicker: " in text and "8 ranks on 4 nodes" in text and "storage" in text
    assert "give --storage-rate" in cli("plan", folder).stdout
    unwanted = f"alone, ranks receive {size_text(said['alone_unwanted_bytes'])} that they do not want"
    assert unwanted in " ".join(text.split()) and "PENSTOCK_EXCHANGE=on" in text
    assert "do not want" not in cli("plan", folder, "--dp", "2").stdout
    within = json.loads(cli("plan", folder, *shape, "--scope", "node", "--json").stdout)
    assert within["together_bytes"] > said["together_bytes"] and not any(n["sent_bytes"] for n in within["nodes"])


@pytest.mark.parametrize(
    "wrong", [["--tp", "0"], ["--storage-rate", "fast"], ["--storage-rate", "0"], ["--nodes", "2"], ["--ep", "3"]]
)
def test_the_command_refuses_what_means_nothing(
    llama: penstock.Checkpoint, cli: Callable[..., Any], wrong: list[str]
) -> None:
    assert cli("plan", llama.files[0], *wrong).returncode == 2


def test_a_plan_prints_a_table(two: penstock.Checkpoint) -> None:
    plan = two.plan([None] * 4, nodes=2)
    assert isinstance(plan, Plan)
    assert str(plan).splitlines()[0] == "4 ranks on 2 nodes want 33.55 MB in sum, of 8.39 MB"
    heads = [line[:22].strip() for line in str(plan).splitlines()[2:6]]
    assert heads == ["read from storage", "the most by one rank", "not wanted", "reads"]
    assert str(plan).splitlines()[1].split() == ["alone", "together"]
    assert str(plan).splitlines()[2].split()[-4:] == ["33.55", "MB", "8.39", "MB"]
