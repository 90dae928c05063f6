"""`penstock serve` beside nginx with sendfile, over loopback: `python benches/serve.py FOLDER --tools FOLDER`.

FOLDER is for the file, --tools has `netbench` (`make netbench` builds it); nginx is on the PATH (Debian: nginx-light).
The bare loop of netbench receives the file with 64 connections into memory whose pages are in use. The file is in the
page cache. The servers take turns, and each has as many workers as it chooses. `copies` is `penstock serve
--no-sendfile`: what a server would reach whose library knows no sendfile. With --tls, all of them encrypt.

The table has medians: the rate, the rate by that of nginx in the same round (at least 0.9 is wanted), and the processor
seconds of the server and of the client for each GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.bench.machine import machine
from penstock.bench.page_cache import fill
from penstock.bench.rounds import rotated
from penstock.bench.served import NotServed, certify, program

NGINX, OURS, COPIES = "nginx", "penstock serve", "copies"
#: Seconds in which a server must be there.
PATIENCE = 30.0

CONFIGURATION = """
worker_processes auto;
error_log stderr crit;
pid {folder}/pid;
daemon off;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    server {{ listen 127.0.0.1:{port}{tls}; root {root}; }}
}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def command(server: str, root: Path, made: Path, port: int, tls: tuple[Path, Path] | None) -> list[str]:
    """The command of a server over `root`; `made` is a folder for its own files."""
    if server == NGINX:
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if nginx is None:
            raise NotServed("there is no nginx on the PATH")
        secure = f" ssl; ssl_certificate {tls[0]}; ssl_certificate_key {tls[1]}" if tls else ""
        (made / "nginx.conf").write_text(CONFIGURATION.format(folder=made, port=port, root=root.resolve(), tls=secure))
        return [nginx, "-p", str(made), "-c", str(made / "nginx.conf")]
    words = [sys.executable, "-m", "penstock.cli", "serve", str(root), "--port", str(port)]
    words += ["--no-sendfile"] if server == COPIES else []
    return words + (["--tls-cert", str(tls[0]), "--tls-key", str(tls[1])] if tls else [])


def processor_seconds(pid: int) -> float:
    """Of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = 0
    for one in (pid, *map(int, children)):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(words: list[str], port: int) -> Iterator[int]:
    """Runs a server until the context is left; its process."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + PATIENCE
            while True:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None or time.monotonic() > until:
                    raise NotServed(f"{words[0]} does not listen")
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tools", type=Path, metavar="FOLDER", help="where netbench is")
    parser.add_argument("--size", type=float, default=2e9, metavar="BYTES", help="of the file (default: 2e9)")
    parser.add_argument("--request", type=int, default=8 << 20, metavar="BYTES", help="of one request (default: 8 MiB)")
    parser.add_argument("--connections", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--tls", action="store_true", help="all of them encrypt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    arguments = parser.parse_args()
    servers = [NGINX, OURS] if arguments.tls else [NGINX, OURS, COPIES]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    about = machine([arguments.folder], None)
    file = arguments.folder / "served.bin"
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as running:
        with file.open("wb") as written:
            for _ in range(int(arguments.size) >> 20):
                written.write(os.urandom(1 << 20))
        running.callback(file.unlink)
        fill([file])
        authority, *pair = certify(Path(made)) if arguments.tls else (None, None, None)
        tls = (pair[0], pair[1]) if arguments.tls else None
        ports = {server: free_port() for server in servers}
        for server in servers:
            (Path(made) / server).mkdir()
        words = {s: command(s, arguments.folder, Path(made) / s, port, tls) for s, port in ports.items()}
        processes = {s: running.enter_context(serving(words[s], ports[s])) for s in servers}
        netbench = str(program("netbench", arguments.tools))
        how = ["--connections", str(arguments.connections), "--request", str(arguments.request), "--memory", "touched"]
        how += ["--authority", str(authority)] if authority else []
        origin = "https://localhost" if authority else "http://127.0.0.1"
        for number in range(arguments.rounds):
            for server in rotated(servers, number):
                before = processor_seconds(processes[server])
                client = [netbench, "receive", f"{origin}:{ports[server]}/{file.name}", *how]
                done = json.loads(subprocess.run(client, check=True, stdout=subprocess.PIPE, text=True).stdout)
                cpu = processor_seconds(processes[server]) - before
                found.append({"server": server, "round": number, "server_cpu_s": cpu, **done})
    print(f"{'':16} {'GB/s':>6} {'by nginx':>9} {'least':>6} {'server s/GB':>12} {'client s/GB':>12}")
    of = {s: [one for one in found if one["server"] == s] for s in servers}
    for server in servers:
        rates = [one["bytes"] / one["seconds"] / 1e9 for one in of[server]]
        ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in zip(of[NGINX], of[server], strict=True)]
        cpu = [
            statistics.median(one[key] / one["bytes"] * 1e9 for one in of[server]) for key in ("server_cpu_s", "cpu_s")
        ]
        print(
            f"{server:16} {statistics.median(rates):6.2f} {statistics.median(ratios):9.2f} {min(ratios):6.2f} "
            f"{cpu[0]:12.3f} {cpu[1]:12.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "found": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
