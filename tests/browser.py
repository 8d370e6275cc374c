"""A headless Chromium, asked over a pair of pipes by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
LACKING = "chromium is not installed (Debian package: chromium)"


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


_ON_3_AND_4 = """
import fcntl, os, sys
far = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(far[0], 3)
os.dup2(far[1], 4)
os.closerange(5, 64)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Where the protocol is."""


class Browser:
    """One process with one tab. `problems`: what its console has of errors and refusals, in words."""

    def __init__(self, program: str, profile: Path) -> None:
        (from_us, to_it), (from_it, to_us) = os.pipe(), os.pipe()
        words = (
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        )
        self._process = subprocess.Popen(
            (sys.executable, "-c", _ON_3_AND_4, str(from_us), str(to_us), *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(from_us, to_us),
            start_new_session=True,
        )
        os.close(from_us)
        os.close(to_us)
        self._to_it, self._from_it = to_it, from_it
        self._read = b""
        self._numbers = itertools.count(1)
        self._events: deque[dict[str, Any]] = deque()
        self.problems: list[str] = []
        self.requested: list[str] = []
        """Addresses."""
        target = self._ask("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True}, None)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        return self._ask(method, parameters, self._session)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        self.wait_for("document.body !== null && document.readyState !== 'loading'")

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """As on such a screen."""
        scale = 2 if phone else 1
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Until it is true; its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, (
                f"never came true: {expression}; {self.problems}; {self.text()[:2000]}"
            )
            self._take(0.05)
        return value

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to_it)
        os.close(self._from_it)

    def _ask(self, method: str, parameters: dict[str, Any], session: str | None) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to_it, data) :]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for answer in self._take(max(0.0, deadline - time.monotonic())):
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]
            assert time.monotonic() < deadline, f"no answer to {method}"

    def _take(self, within_s: float) -> list[dict[str, Any]]:
        """Messages that have come; of events, what they tell is kept."""
        if not select.select([self._from_it], [], [], within_s)[0]:
            return []
        data = os.read(self._from_it, 1 << 20)
        assert data, "the browser has ended"
        *whole, self._read = (self._read + data).split(b"\0")
        messages: list[dict[str, Any]] = [json.loads(text) for text in whole]
        for message in messages:
            self._note(message.get("method", ""), message.get("params", {}))
        return messages

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(str(told["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"]))
        elif method == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])


@contextlib.contextmanager
def browsing(program: str) -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, Path(profile))
        try:
            yield browser
        finally:
            browser.close()
