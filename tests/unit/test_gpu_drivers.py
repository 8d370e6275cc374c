"""What a preloaded process has open of a GPU's driver, by a made-up table of open files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.workers.preloader.imported import gpu_driver_in_use

HARMLESS = (
    "/dev/null",
    "socket:[17]",
    "pipe:[4]",
    "/data/dev/nvidia0",
    "/dev/shm/x",
    "anon_inode:[eventpoll]",
)


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
    assert gpu_driver_in_use(table(tmp_path, *HARMLESS, device)) == device


def test_other_files_are_no_drivers_nor_are_those_that_were_just_closed(tmp_path: Path) -> None:
    (tmp_path / "closed").touch()  # as of one that is gone, its target cannot be read
    assert gpu_driver_in_use(table(tmp_path, *HARMLESS)) == ""
    assert gpu_driver_in_use() == ""


def test_a_process_that_has_a_driver_open_forks_no_spares_and_says_why() -> None:
    program = (
        "from elastic_agent.agent.workers.preloader import imported\n"
        "imported.gpu_driver_in_use = lambda: '/dev/nvidiactl'\n"
        "try: imported.Imported(()).check()\n"
        "except imported.Unfit as unfit: print(unfit.stale, unfit)\n"
    )
    checked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    why = "something that it imports has opened /dev/nvidiactl, a GPU's driver, which no fork can use"
    assert (checked.stdout, checked.stderr) == (f"False {why}\n", "")
