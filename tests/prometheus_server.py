"""A real Prometheus for tests, and questions to it."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

PATIENCE_S = 60.0

Series = tuple[dict[str, str], float]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs: `address` is its API's, `log` the file with what it says."""

    address: str
    log: Path

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of the answer; None while it is still starting. A refused question fails the test."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            pytest.fail(f"Prometheus refuses {path} {parameters}: {error.read().decode()}")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def query(self, expression: str) -> list[Series]:
        """(labels, value) of every series that it gives now, without those of which the value is no number."""
        answer = self.ask("query", query=expression)
        found = (
            [(series["metric"], float(series["value"][1])) for series in answer["result"]] if answer else []
        )
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def query_since(self, expression: str, since: float) -> list[Series]:
        """The same for every second since that instant, seconds since the epoch, as a graph asks."""
        answer = self.ask("query_range", query=expression, start=since, end=time.time(), step=1)
        series = answer["result"] if answer else []
        found = [(each["metric"], float(value)) for each in series for _, value in each["values"]]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def wait_for(self, expression: str) -> list[Series]:
        log = self.log
        return wait_for(
            lambda: self.query(expression),
            f"a series for {expression}",
            PATIENCE_S,
            seen=lambda: f"the end of Prometheus' log:\n{log.read_text()[-2000:]}",
        )


@contextmanager
def prometheus(config: Path) -> Iterator[Prometheus]:
    """One with this configuration and its data beside it. Skips the test where there is none."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian package: prometheus)")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        # It cannot be handed a bound socket. Should somebody take the port meanwhile, it exits and its log says so.
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = config.parent
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    log = folder / "prometheus.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield Prometheus(address, log)
    finally:
        process.kill()
        process.wait()
