"""Loaders that fetch from a web server, as contestants: what penstock's own addresses are compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from . import served
from .job import Job, Pairs, State, Tensors
from .verification import touch


def runai_streamer_s3(job: Job) -> Pairs:
    from runai_model_streamer import SafetensorsStreamer

    # The server takes the first part of a path for the bucket's name
    keys = [f"s3://{url.split('/', 3)[3]}" for url in job.urls]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(keys, device=job.device)
        for name, tensor in streamer.get_tensors():
            # What it yields is overwritten later
            yield name, tensor.clone() if job.device == "cpu" else tensor


def by_go(job: Job, into: Path) -> None:
    """16 connections and ranges: as much as a downloader can do."""
    served.download(job.urls, into, job.tools)


def by_boto3(job: Job, into: Path) -> None:
    """Amazon's library for Python as it comes: ten threads and ranges of 8 MiB, file by file."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))
    for url in job.urls:
        bucket, key = url.split("/", 4)[3:]
        client.download_file(bucket, key, str(into / key))


def downloaded(download: Callable[[Job, Path], None], folder: str | None) -> Callable[[Job], Tensors]:
    """Downloads into a new folder, in `folder` or beside the checkpoint; safetensors maps it, and it is touched."""

    def load(job: Job) -> Tensors:
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory(prefix="penstock-download-", dir=folder or job.files[0].parent) as into:
            download(job, Path(into))
            state: State = {}
            for url in job.urls:
                state |= load_file(Path(into) / url.rpartition("/")[2], device=job.device)
            # What is mapped stays when the files are unlinked
            if job.device == "cpu":
                touch(state)
        return state

    return load
