"""Empty tensors whose other dimensions overflow: torch freed the capsule of such a one twice and ended the process."""

import json
import struct

import penstock
import pytest


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**63, 0], [0, 2**64 - 1]])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_an_empty_tensor_too_wide_for_the_framework_is_an_error_that_names_it(tmp_path, torch_python, shape, framework):
    header = json.dumps({"wide": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "empty.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert penstock.open(path)["wide"].shape == tuple(shape)
    code = (
        "import sys, penstock\n"
        "try:\n"
        "    penstock.open(sys.argv[1]).load(framework=sys.argv[2])\n"
        "except penstock.UnsupportedError as error:\n"
        "    print(error)\n"
    )
    run = torch_python(code, path, framework)
    assert run.returncode == 0, run.stderr
    assert "wide" in run.stdout and str(path) in run.stdout
