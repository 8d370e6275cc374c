"""A job for each test: whatever the test leaves running is ended, and an orphan or a broken promise fails it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster

from .harness import Job


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
