"""A job for each test: whatever the test leaves running is ended, and an orphan or a broken promise fails it.

Tests that let the store suffer note the longest gap in training; the end of the run shows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster, etcd_is_installed
from tests.installed import Installed

from .harness import TRAINING_GAP, Job, longest_training_gap
from .pools import Pool
from .users import User


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    """One member, for all tests that do it no harm."""
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.fixture
def pool(job: Job) -> Iterator[Pool]:
    pool = Pool(job)
    yield pool
    pool.close()


@pytest.fixture
def user(job: Job, installed: Installed) -> Iterator[User]:
    user = User(job, installed)
    yield user
    user.close()


@pytest.fixture
def in_etcd(job: Job, request: pytest.FixtureRequest) -> None:
    """For a test that may meet anywhere: agents need no torch for etcd. Where there is none, the first one hosts."""
    if etcd_is_installed():
        job.use_etcd(request.getfixturevalue("etcd"), in_order=True)


@pytest.fixture
def second_job(tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "second"
    folder.mkdir()
    job = Job(folder)
    yield job
    job.close()


@pytest.fixture
def note_gap(record_property: Callable[[str, object], None]) -> Callable[[str, Job], float]:
    """Measures the job's whole history, and puts the gap into the table under the name of the fault."""

    def note(fault: str, job: Job) -> float:
        gap_s = longest_training_gap(job.steps())
        record_property(TRAINING_GAP, (fault, gap_s))
        return gap_s

    return note
