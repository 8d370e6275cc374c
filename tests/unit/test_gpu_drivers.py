"""What a preloaded process has open of a GPU's driver, by a made-up table of open files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.workers.preloader import gpu_drivers

PROCESS = Path(gpu_drivers.__file__).with_name("process.py")

HARMLESS = (
    "/dev/null",
    "socket:[17]",
    "pipe:[4]",
    "/data/dev/nvidia0",
    "/dev/shm/x",
    "anon_inode:[eventpoll]",
)

CHECKED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("preloaded_process", sys.argv[1])
process = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)
process.gpu_drivers.in_use.__defaults__ = (sys.argv[2],)
try:
    process.Imported(process.wire.Preload((), (), "")).check()
except process.Unfit as unfit:
    print(unfit.stale, unfit)
"""


def table(folder: Path, *targets: str) -> str:
    for descriptor, target in enumerate(targets):
        (folder / str(descriptor)).symlink_to(target)
    return str(folder)


@pytest.mark.parametrize(
    "device",
    [
        "/dev/nvidiactl",
        "/dev/nvidia0",
        "/dev/nvidia-uvm",
        "/dev/kfd",
        "/dev/dri/renderD128",
        "/dev/accel/accel0",
    ],
)
def test_an_open_device_file_of_any_maker_is_found(tmp_path: Path, device: str) -> None:
    assert gpu_drivers.in_use(table(tmp_path, *HARMLESS, device)) == device


def test_other_files_are_no_drivers_nor_are_those_that_were_just_closed(tmp_path: Path) -> None:
    (tmp_path / "closed").touch()  # as of one that is gone, its target cannot be read
    assert gpu_drivers.in_use(table(tmp_path, *HARMLESS)) == ""
    assert gpu_drivers.in_use() == ""


def test_a_process_that_has_a_driver_open_forks_no_spares_and_says_why(tmp_path: Path) -> None:
    open_files = table(tmp_path, "/dev/null", "/dev/nvidiactl")
    command = [sys.executable, "-c", CHECKED, str(PROCESS), open_files]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert checked.stderr == ""
    why = "something that it imports has opened /dev/nvidiactl, a GPU's driver, which no fork can use"
    assert checked.stdout == f"False {why}\n"
