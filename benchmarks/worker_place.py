"""Runs a part of a benchmark in a process that stands where a worker stands, and this process where its agent does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

GENERATION = 1


def measure(words: Sequence[str], variables: Mapping[str, str]) -> Any:
    """What `python WORDS` prints as JSON, as rank 0 of GENERATION; `variables` name what it shares with its agent."""
    place = {"ELASTIC_AGENT_GENERATION": str(GENERATION), "RANK": "0", "ELASTIC_AGENT_LOCAL_RANK": "0"}
    environment = {**os.environ, **place, **variables}
    command = [sys.executable, *words]
    return json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    )
