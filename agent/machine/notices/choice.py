"""Which source of notices this machine has, by --notice.

`auto` looks at what the firmware says of the machine (/sys/class/dmi/id), which needs no network, and asks no one on
a machine that is in none of the clouds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...configuration.values import NoticeSource
from . import aws, azure, gcp
from .local import Tied, WatchedCommand, WatchedFile
from .metadata_server import MetadataServer
from .notice import Source

DMI = Path("/sys/class/dmi/id")
FIELDS = ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag")

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Of each machine in Azure, and of no other one on Hyper-V."""


def read_dmi(folder: Path = DMI) -> Mapping[str, str]:
    """What any user may read of it; a field that is not there is empty."""
    found = {}
    for name in FIELDS:
        try:
            found[name] = (folder / name).read_text(errors="replace").strip()
        except OSError:
            found[name] = ""
    return found


def detect_cloud(dmi: Mapping[str, str]) -> str:
    """aws, gcp or azure; empty: none of them."""
    if dmi["sys_vendor"] == "Amazon EC2" or dmi["bios_version"].endswith(".amazon"):
        return "aws"
    if dmi["sys_vendor"] == "Google" and dmi["product_name"] == "Google Compute Engine":
        return "gcp"
    return "azure" if dmi["chassis_asset_tag"] == AZURE_TAG else ""


def source_for(
    wanted: NoticeSource,
    dmi: Mapping[str, str],
    environment: Mapping[str, str],
    tied: Tied,
    clock: Callable[[], float] = time.monotonic,
) -> Source | None:
    """None: there is nothing to look at. `environment` and `tied` are for a command."""
    kind = detect_cloud(dmi) if wanted.kind == "auto" else wanted.kind
    if kind in ("aws", "aws-rebalance"):
        server = MetadataServer(aws.HOST, clock)
        return aws.Aws(server, clock, leaves_on_rebalance=kind == "aws-rebalance")
    if kind == "gcp":
        return gcp.Gcp(MetadataServer(gcp.HOST, clock))
    if kind == "azure":
        return azure.Azure(MetadataServer(azure.HOST, clock))
    if kind == "file":
        return WatchedFile(wanted.path, clock)
    return WatchedCommand(wanted.path, environment, tied) if kind == "command" else None
