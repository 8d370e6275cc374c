"""torchrun's parameters of a rendezvous as a `Config`, read and checked by the code that reads our own options.

Errors about them are put into torchrun's words, so that advice can be followed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...rendezvous.etcd.kind import ETCD
from ..configuration.config import LOCAL_ADDR, MAX_NODES, MIN_NODES, NO_PYTHON, Config, ConfigError, Problem
from ..configuration.derive import resolve
from ..configuration.parse import Option
from ..configuration.rendezvous import BACKEND, ENDPOINT, JOB_ID
from ..configuration.settings import IGNORED_RDZV_CONF_KEYS, RDZV_CONF_KEYS, Settings

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

PREFIX = "prefix"
"""A key of `--rdzv-conf` for what our own program takes from the endpoint's URL only."""

KEYS = (*RDZV_CONF_KEYS, PREFIX)


def read_parameters(params: RendezvousParameters, secrets: Mapping[str, str]) -> Config:
    """`secrets` are the variables that hold one. Raises ValueError with all problems."""
    settings = Settings()
    settings.put(BACKEND, ETCD.name, "--rdzv-backend")
    settings.put(JOB_ID, params.run_id, "--rdzv-id")
    settings.put(MIN_NODES, str(params.min_nodes), "--nnodes")
    settings.put(MAX_NODES, str(params.max_nodes), "--nnodes")
    settings.put(NO_PYTHON, "torchrun", "torchrun")  # it starts the workers, and knows what they are
    if params.local_addr is not None:
        settings.put(LOCAL_ADDR, params.local_addr, "--local-addr")
    conf = {key.replace("-", "_"): str(value) for key, value in params.config.items()}
    _put_endpoint(settings, params.endpoint, conf.pop(PREFIX, None))
    for key, text in conf.items():
        if key in RDZV_CONF_KEYS:
            settings.put(RDZV_CONF_KEYS[key], text, f"--rdzv-conf {key}")
        elif key not in IGNORED_RDZV_CONF_KEYS:
            expected = f"a key of {', '.join(KEYS)}"
            settings.problems.append(
                Problem(f"--rdzv-conf {key}", None, expected, "correct it, or leave it out")
            )
    try:
        return resolve(settings, secrets, lambda: uuid.uuid4().hex).config
    except ConfigError as error:
        raise ValueError(in_torchruns_words(str(error))) from None


def _put_endpoint(settings: Settings, endpoint: str, prefix: str | None) -> None:
    if prefix is None:
        settings.put(ENDPOINT, endpoint, "--rdzv-endpoint")
    elif "/" in endpoint.removeprefix("etcd://"):
        problem = Problem(
            f"--rdzv-conf {PREFIX}", prefix, "no other prefix in --rdzv-endpoint", "keep one of the two"
        )
        settings.problems.append(problem)
        settings.broken.add(ENDPOINT.name)
    else:
        hosts = endpoint.removeprefix("etcd://")
        settings.put(ENDPOINT, f"etcd://{hosts}/{prefix.strip('/')}", "--rdzv-endpoint")


_WORDS: dict[str, tuple[str, Option[object]]] = {}
for _key, _option in RDZV_CONF_KEYS.items():
    _WORDS.setdefault(_option.name, (_key, _option))


def in_torchruns_words(text: str) -> str:
    """Our options as torchrun's user writes them: `--etcd-ca FILE` is `--rdzv-conf ca=FILE`."""

    def reword(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name in (MIN_NODES.name, MAX_NODES.name):
            return "--nnodes"
        if name not in _WORDS:
            return match[0]
        key, option = _WORDS[name]
        value = "true" if option.flag else value
        return f"--rdzv-conf {key}={value}" if value else f"--rdzv-conf {key}"

    return re.sub(r"--([a-z-]+)(?: ([A-Z]+)\b)?", reword, text)
