"""Ranks of an engine whose model changes its parameters before its own loader ends: they load together all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks_together import Ranks

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

PROGRAM = """
from penstock.integrations._engine import Chosen, Loads
from penstock._options import make_options

options = make_options({"exchange": "on", "join_timeout": 60.0})
loads = Loads(torch.device("cpu"), options)
loads.join(lambda: group)
model = torch.nn.Module()
with loads.barrier():
    for place in places:
        for name, tensor in loads.weights(Chosen([place]), None, None):
            into = torch.nn.Parameter(torch.empty(tensor.shape), requires_grad=False)
            into.copy_(tensor)
            model.register_parameter(f"{place.rsplit('/', 1)[1][0]}{name}", into)
            if early and name == "0" and rank == 0:
                said["early"] = float(into.sum())
        if touches == "all" or touches == "one" and rank == 0:
            said["sum"] = [float(into.sum()) for into in model.parameters()]
    reports = loads.run(model)
said["exchange"] = [report["exchange"] for report in reports]
said["nbytes"] = [report["nbytes"] for report in reports]
said["right"] = all(
    torch.equal(into, safe_open(place, "pt").get_tensor(name[1:]))
    for place in places
    for name, into in model.named_parameters()
    if name[0] == place.rsplit("/", 1)[1][0]
)
# The next load of the group is numbered alike on all ranks
said["again"] = len(penstock.open(path).load(group=group, options=options))
"""


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("touches", ["all", "one", "none"])
@pytest.mark.parametrize("several", [False, True])
def test_ranks_whose_loader_touches_a_parameter(
    together: Callable[..., Ranks], tmp_path: Path, several: bool, touches: str, early: bool
) -> None:
    from safetensors.torch import save_file

    places = [tmp_path / f"{letter}.safetensors" for letter in "ab"[: 1 + several]]
    for seed, place in enumerate(places):
        torch.manual_seed(seed)
        save_file({str(number): torch.randn(300, 1000) for number in range(4)}, place)
    given = {"places": list(map(str, places)), "touches": touches, "early": early}
    with together(PROGRAM, 3, places[0], **given) as ranks:
        said = ranks.all()
    for one in said:
        assert one["right"] and one["again"] == 4
        assert len(one["exchange"]) == len(places)
    for number in range(len(places)):
        exchanged = [one["exchange"][number] for one in said]
        assert sum(e["sent_bytes"] for e in exchanged) == sum(e["received_bytes"] for e in exchanged)
        # What a rank has touched before it had all tensors it has read alone, and all of it if there are more places
        whole = 4 * 300 * 1000 * 4
        if number == 0 or touches == "none":
            assert sum(e["received_bytes"] for e in exchanged) >= 2 * whole * 3 // 4
