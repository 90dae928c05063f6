"""Loaders that fetch from a web server, as contestants: what penstock's own addresses are compared with."""

from __future__ import annotations

import shutil
import tempfile
import time
import urllib.request
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


def by_urllib(job: Job, into: Path) -> None:
    """Python itself: one connection, file by file."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in job.urls:
        with direct.open(url) as answer, (into / url.rpartition("/")[2]).open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)


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


def shards(folder: Path) -> list[Path]:
    """The weights in a folder that was downloaded into."""
    return sorted(folder.glob("*.safetensors"))


def downloaded_once(
    download: Callable[[Job, Path], None], load: Callable[[Job, list[Path]], Tensors]
) -> Callable[[Job], Tensors]:
    """Downloads if the folder of the first start is empty, and loads what is in there."""

    def start(job: Job) -> Tensors:
        assert job.kept is not None
        if not shards(job.kept):
            download(job, job.kept)
        return load(job, shards(job.kept))

    return start


def by_safetensors(job: Job, files: list[Path]) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(file, device=job.device).items()}


def by_penstock(job: Job, files: list[Path]) -> Tensors:
    import penstock

    begun = time.perf_counter()
    checkpoint = penstock.open(files)
    job.noted["open_s"] = time.perf_counter() - begun
    return checkpoint.load(job.device, progress=False)
