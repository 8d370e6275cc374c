"""What torchrun's user writes, as our configuration: every mistake at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_agent.agent.configuration.config import Config
from elastic_agent.agent.configuration.load import IGNORED_RDZV_CONF_KEYS, RDZV_CONF_KEYS
from elastic_agent.agent.configuration.parse import NodeCounts
from elastic_agent.agent.configuration.rendezvous import EtcdConfig
from elastic_agent.agent.torchrun.handler import read_parameters
from elastic_agent.rendezvous.records import Endpoint

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating.md"


def read(endpoint: str = "localhost", run_id: str = "job", **conf: object) -> Config:
    params = RendezvousParameters("etcd-v3", endpoint, run_id, 1, 3, timeout=900, **conf)
    return read_parameters(params)


def complaint(**wrong: object) -> str:
    with pytest.raises(ValueError) as refused:
        read(**wrong)  # type: ignore[arg-type]
    return str(refused.value)


def test_what_torchrun_is_given_arrives() -> None:
    config = read("127.0.0.1:1,[::1]", join_timeout="60", last_call_timeout=2, lease_ttl="3")
    rendezvous = config.rendezvous
    assert rendezvous.endpoints == (Endpoint("127.0.0.1", 1), Endpoint("::1", 2379))
    assert (rendezvous.backend, rendezvous.job_id, config.nodes) == ("etcd", "job", NodeCounts(1, 3))
    assert (rendezvous.join_timeout_s, rendezvous.last_call_s, rendezvous.lease_ttl_s) == (60.0, 2.0, 3.0)
    assert rendezvous.etcd == EtcdConfig()


def test_a_prefix_is_part_of_the_url() -> None:
    etcd = read("etcd://localhost:2379/my/prefix").rendezvous.etcd
    assert etcd is not None
    assert etcd.prefix == "/my/prefix"


def test_the_login_reaches_etcd(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("ca", "cert", "key", "password_file")}
    for file in files.values():
        file.write_text("content")
        file.chmod(0o600)
    etcd = read("h1,h2", user="trainer", **files).rendezvous.etcd
    assert etcd == EtcdConfig(
        ca=files["ca"],
        cert=files["cert"],
        key=files["key"],
        user="trainer",
        password_file=files["password_file"],
    )


def test_torchs_keys_without_meaning_here_are_accepted() -> None:
    assert read(**dict.fromkeys(IGNORED_RDZV_CONF_KEYS - {"timeout"}, "1")) == read()


def test_all_mistakes_are_listed_at_once_and_no_value_of_an_unknown_key() -> None:
    said = complaint(endpoint="h1:99999", run_id="a/b", lease_ttl="soon", password="canary", cert="/absent")
    for origin in ("--rdzv-endpoint", "--rdzv-id", "--rdzv-conf lease_ttl", "--rdzv-conf password"):
        assert f". {origin}" in said
    assert "canary" not in said


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"endpoint": ""}, "--rdzv-endpoint"),
        ({"endpoint": "etcd.example:2379"}, "add --etcd-ca FILE, or --etcd-insecure to send"),
        ({"run_id": "none"}, "add --rdzv-id NAME"),
        ({"user": "trainer"}, "add --etcd-password-file FILE"),
        ({"join_timeout": 2}, "lower --lease-ttl or raise --join-timeout"),
        ({"leasettl": 2}, "lease_ttl"),
        ({"prefix": "/mine"}, "write it in --rdzv-endpoint: etcd://HOST/PREFIX"),
    ],
)
def test_the_advice_can_be_followed(wrong: dict[str, object], advice: str) -> None:
    assert advice in complaint(**wrong)


def test_every_key_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [key for key in (*RDZV_CONF_KEYS, *IGNORED_RDZV_CONF_KEYS) if f"`{key}`" not in text] == []
