"""A real browser to look at pages with: Chromium without a window, spoken to over pipes in its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOW_TO_GET_IT = "there is no Chromium here; on Debian `apt-get install chromium` brings it"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars")
QUIET = ("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio")
# Chromium reads its orders from file 3 and answers to file 4.
WIRING = "import os, sys; [os.dup2(int(sys.argv[k]), k + 2) for k in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
PATIENCE = 30.0  # seconds for an answer


class Browser:
    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        reads, self._ours_out = os.pipe()
        self._ours_in, writes = os.pipe()
        # far from 3 and 4, which they are to become
        ends = tuple(fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (reads, writes))
        command = [CHROMIUM, *FLAGS, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", WIRING, *map(str, ends), *command],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (reads, writes, *ends):
            os.close(end)
        os.set_blocking(self._ours_in, False)
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.session = None
            self.ask("Browser.close")
            self._process.wait(5)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)  # a group of its own
            self._process.wait(5)
        finally:
            os.close(self._ours_in)
            os.close(self._ours_out)

    # -- the protocol ------------------------------------------------------------
    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._ours_out, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                return dict(heard["result"])
            self.events.append(heard)

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            try:
                part = os.read(self._ours_in, 1 << 20)
                if not part:
                    raise OSError("Chromium has ended")
                self._buffer += part
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("Chromium does not answer") from None
                time.sleep(0.002)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    # -- what tests do with it -----------------------------------------------------
    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> float:
        """Seconds until the page is loaded and drawn."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        start = time.perf_counter()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._hear())
        drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        self.ask("Runtime.evaluate", expression=drawn, awaitPromise=True)
        return time.perf_counter() - start

    def value(self, expression: str) -> Any:
        """Of JavaScript that the test, not the page, brings along."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path, whole: bool = False) -> None:
        picture = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for, the page's own left out."""
        sent = [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent[1:] if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """What the console said, and errors nobody caught."""
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in said]
