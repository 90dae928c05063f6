"""A headless Chromium, driven over the DevTools protocol by a pair of pipes: no port, no driver, no other package.

With `--remote-debugging-pipe` the browser reads messages from descriptor 3 and writes them to descriptor 4, each a JSON
document ended by a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str | None:
    """The browser of this machine, or the one that PENSTOCK_TEST_BROWSER names."""
    return os.environ.get("PENSTOCK_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page. What it said and fetched since the last `open` is in `problems` and `requests`."""

    def __init__(self, path: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="browser-")
        to_browser, self._write = _pipe()
        self._read, from_browser = _pipe()
        log = str(Path(self.folder) / "log")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self.pid = os.posix_spawn(
            path,
            [path, *SWITCHES, f"--user-data-dir={self.folder}/profile", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, to_browser, 3),
                (os.POSIX_SPAWN_DUP2, from_browser, 4),
            ],
            setpgroup=0,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = 60.0, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + timeout
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                log = (Path(self.folder) / "log").read_text(errors="replace")[-2000:]
                raise TimeoutError(f"the browser {'said nothing in time' if not ready else 'ended'}: {log}")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Opens a file, in a window of that size in CSS pixels, and waits until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, timeout: float = 30.0) -> None:
        until = time.monotonic() + timeout
        while not self.evaluate(condition):
            assert time.monotonic() < until, f"{condition} did not come true: {self.problems}"
            time.sleep(0.05)

    @property
    def problems(self) -> list[str]:
        """Errors and warnings of the page: uncaught, logged, or of the browser about it."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(str(details.get("exception", {}).get("description") or details["text"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in parameters["args"]))
            elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            elif event.get("method") == "Page.javascriptDialogOpening":
                found.append(f"dialog: {parameters['message']}")
        return found

    @property
    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        found = self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(AssertionError, TimeoutError, OSError):
            self.call("Browser.close", timeout=10.0)
        until = time.monotonic() + 5
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.killpg(self.pid, signal.SIGKILL)  # the group that this made for it
                os.waitpid(self.pid, 0)
                break
            time.sleep(0.02)
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self.folder, ignore_errors=True)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are neither 3 nor 4, which the browser gets as its own."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
