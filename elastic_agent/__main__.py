"""`python -m elastic_agent`: the same as the command `elastic-agent`."""

from __future__ import annotations

import sys

from .agent.cli import main

sys.exit(main())
