"""A reader beside saves over the same prefix: each read is one version, whole, or an error says that it changed."""

from __future__ import annotations

import pytest
from readers_beside_saves import each_read_is_one_version
from test_uploads import PLACE, bucket, settings
from upload_server import Uploads

__all__ = ["bucket"]  # a fixture


@pytest.mark.sampled(1)
@pytest.mark.parametrize("saves", [20, 200])
def test_each_read_beside_saves_is_one_version_or_says_that_it_changed(bucket: Uploads, saves: int) -> None:
    found = each_read_is_one_version(PLACE, settings(bucket), saves)
    assert found.keys() <= {"whole", "ChangedError", "NotFoundError"}
    assert found["whole"] >= saves / 20, found
