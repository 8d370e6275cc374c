"""The jobs of tests/system, whose scripts are the examples for other libraries. `make frameworks` installs those."""

from tests.system.conftest import job, second_job  # noqa: F401
