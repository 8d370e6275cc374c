"""torchrun's spellings that have no option of their own here: keys of `--rdzv-conf`, and what can be ignored."""

from __future__ import annotations

from ..options import OPTIONS

RDZV_CONF_KEYS = {key: option for option in OPTIONS for key in option.conf}
"""The first key of several for one option is the one to recommend."""

IGNORED_RDZV_CONF_KEYS = frozenset(
    {"timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"}
    | {"read_timeout", "is_host", "rank", "store_type", "protocol", "etcd_prefix"}
)

# Option, each with one value, and why it can be ignored. Training runs the same without them.
IGNORED_TORCHRUN_OPTIONS = {
    "role": "all workers have one role",
    "redirects": "each worker's output goes to its own files with --log-dir",
    "tee": "the console always shows every worker's output",
    "local-ranks-filter": "the console always shows every worker's output",
    "monitor-interval": "a worker's end is noticed at once, nothing is polled",
    "start-method": "it only concerns functions as entry points",
    "event-log-handler": "events go to the agent's log",
    "signals-to-handle": "SIGTERM and SIGINT stop the agent in order",
    "duplicate-stdout-filters": "each worker's output goes to its own files with --log-dir",
    "duplicate-stderr-filters": "each worker's output goes to its own files with --log-dir",
    "logs-specs": "each worker's output goes to its own files with --log-dir",
}
# The same, without a value.
IGNORED_TORCHRUN_FLAGS = {"run-path": "a script runs as `python SCRIPT` runs it"}
IGNORED_TORCHRUN_SHORTS = {"-r": "redirects", "-t": "tee"}
