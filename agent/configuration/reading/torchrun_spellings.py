"""torchrun's spellings that have no option of their own here: keys of `--rdzv-conf`, variables, what can be ignored."""

from __future__ import annotations

from ..config import MODULE, NO_PYTHON
from ..logs import LOG_LEVEL, PREFIX_TEMPLATE
from ..options import OPTIONS
from ..stopping import STOP_GRACE
from ..types.option import Option

RDZV_CONF_KEYS = {key: option for option in OPTIONS for key in option.conf}
"""The first key of several for one option is the one to recommend."""

VARIABLES: dict[str, Option[object]] = {
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": PREFIX_TEMPLATE,
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": STOP_GRACE,
    "LOGLEVEL": LOG_LEVEL,
}
"""Besides `PET_*`, and weaker."""

TARGET_SWITCHES: dict[str, Option[str | None]] = {"PET_MODULE": MODULE, "PET_NO_PYTHON": NO_PYTHON}
"""Variables that take the place of a switch on the command line; 0 is off."""

IGNORED_RDZV_CONF_KEYS = frozenset(
    {"timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"}
    | {"read_timeout", "is_host", "rank", "store_type", "protocol", "etcd_prefix"}
)

# Option, each with one value, and why it can be ignored. Training runs the same without them.
IGNORED_TORCHRUN_OPTIONS = {
    "monitor-interval": "a worker's end is noticed at once, nothing is polled",
    "start-method": "it only concerns functions as entry points",
    "event-log-handler": "events go to the agent's log",
    "exit-barrier-timeout": "an agent waits for no other at its end; --exit-timeout is for ranks that do not end",
    "logs-specs": "--log-dir, --redirects and --tee say where lines go",
}
