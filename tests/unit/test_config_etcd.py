"""The configuration of an etcd store: where it is, how to speak to it, and that no secret is ever shown."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from elastic_agent.agent.configuration.config import Config
from elastic_agent.agent.configuration.derive import Resolved
from elastic_agent.agent.configuration.rendezvous import ETCD_OPTIONS, EtcdConfig, RendezvousConfig
from elastic_agent.rendezvous.records import Endpoint
from tests.unit import settings

PASSWORD = "ELASTIC_AGENT_ETCD_PASSWORD"
CANARY = "canary-7Xq"
JOB = ["--rdzv-id", "j"]
LOCAL = ["--rdzv-endpoint", "etcd://localhost", *JOB]
RUN = ["-m", "mod"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the test runs in: `ca`, `cert`, `key` and `pw` as they should be."""
    for name in ("ca", "cert", "key", "pw"):
        (tmp_path / name).write_text(f"{name}\n")
        (tmp_path / name).chmod(0o600)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_resolve(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Resolved:
    return settings.run_resolve([*argv, *RUN], environ)


def rendezvous_of(argv: str, environ: Mapping[str, str] | None = None) -> RendezvousConfig:
    return run_resolve(shlex.split(argv), environ).config.rendezvous


def problems_of(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    return settings.problems_of([*argv, *RUN], environ)


# --- Where the store is


@pytest.mark.parametrize(
    ("argv", "endpoints", "prefix"),
    [
        ("--rdzv-backend etcd --rdzv-endpoint localhost", [("localhost", 2379)], "/elastic-agent"),
        ("--rdzv-backend etcd-v3 --rdzv-endpoint 127.0.0.2:7", [("127.0.0.2", 7)], "/elastic-agent"),
        (
            "--rdzv-backend etcd --etcd-insecure --rdzv-endpoint h1,h2:2380,[fe80::3]:5,[::1]",
            [("h1", 2379), ("h2", 2380), ("fe80::3", 5), ("::1", 2379)],
            "/elastic-agent",
        ),
        ("--rdzv-endpoint etcd://localhost", [("localhost", 2379)], "/elastic-agent"),
        ("--rdzv-endpoint etcd://localhost/", [("localhost", 2379)], "/elastic-agent"),
        ("--rdzv-endpoint etcd://localhost/team-a/jobs/", [("localhost", 2379)], "/team-a/jobs"),
        (
            "--rdzv-backend etcd --rdzv-endpoint etcd://[::1]:5,localhost/p",
            [("::1", 5), ("localhost", 2379)],
            "/p",
        ),
        (
            "--rdzv-endpoint localhost:1,localhost:2 --rdzv-backend=etcd",
            [("localhost", 1), ("localhost", 2)],
            "/elastic-agent",
        ),
    ],
)
def test_where_the_store_is(argv: str, endpoints: list[tuple[str, int]], prefix: str) -> None:
    rendezvous = rendezvous_of(f"{argv} --rdzv-id j")
    assert rendezvous.backend == "etcd"
    assert rendezvous.endpoints == tuple(Endpoint(host, port) for host, port in endpoints)
    assert rendezvous.etcd == EtcdConfig(prefix)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("etcd://h1,,h2", "a host is missing"),
        ("etcd://", "a host is missing"),
        ("h1:2379,", "a host is missing"),
        ("etcd://::1", "write an IPv6 address in brackets"),
        ("etcd://h1:99999", "write a number from 0 to 65535"),
        ("h1/p", "only etcd://HOST:PORT,.../PREFIX has a prefix"),
        ("https://h1:2379", "TLS is used when --etcd-ca FILE is given"),
        ("etcd3://h1:2379", "write HOST:PORT,... or etcd://HOST:PORT"),
        ("etcd://h1//p", "of up to 8 names between slashes"),
        ("etcd://h1/a/../b c", "of up to 8 names between slashes"),
        ("etcd://h1/" + "a/" * 9, "of up to 8 names between slashes"),
        ("etcd://h1?x=1", "check the spelling"),
        ("etcd://h1/p#x", "of up to 8 names"),
        ("etcd://root:pw@h1", "do not belong here: use --etcd-user NAME and --etcd-password-file FILE"),
        ("root@h1", "do not belong here: use --etcd-user NAME and --etcd-password-file FILE"),
    ],
)
def test_endpoints_that_cannot_be_read(text: str, advice: str) -> None:
    (problem,) = problems_of(["--rdzv-endpoint", text, *JOB])
    assert advice in problem


@pytest.mark.parametrize(
    ("argv", "origin", "advice"),
    [
        (
            "--rdzv-endpoint h1,h2 --rdzv-id j",
            "--rdzv-endpoint 'h1:29400,h2:29400'",
            "use --rdzv-backend etcd",
        ),
        (
            "--rdzv-backend c10d --rdzv-endpoint etcd://localhost,h2",
            "--rdzv-endpoint 'etcd://localhost:29400,h2:29400'",
            "an endpoint of c10d",
        ),
        (
            "--rdzv-backend memory --rdzv-endpoint etcd://localhost",
            "--rdzv-endpoint 'etcd://localhost'",
            "an endpoint of memory",
        ),
        ("--rdzv-backend etcd --rdzv-id j", "rdzv-endpoint (default)", "the members of the etcd cluster"),
        ("--rdzv-endpoint etcd://localhost", "rdzv-id (default)", "a name for this job"),
        ("--rdzv-endpoint etcd://localhost --rdzv-id none", "--rdzv-id 'none'", "a name for this job"),
        (
            "--rdzv-endpoint etcd://localhost:0 --rdzv-id j",
            "--rdzv-endpoint 'etcd://localhost:0'",
            "ports from 1",
        ),
        (
            "--rdzv-backend etcd --rdzv-endpoint localhost:0 --rdzv-id j",
            "--rdzv-endpoint 'localhost:0'",
            "ports from 1 to 65535",
        ),
        (
            "--rdzv-endpoint etcd://h1,localhost --rdzv-id j",
            "--rdzv-endpoint 'etcd://h1:2379,localhost:2379'",
            "TLS",
        ),
    ],
)
def test_stores_that_cannot_be_met_in(argv: str, origin: str, advice: str) -> None:
    (found,) = problems_of(argv.split())
    assert found.startswith(f"{origin}: expected ")
    assert advice in found


# --- How to speak to it


TLS = {"etcd-ca": "ca", "etcd-cert": "cert", "etcd-key": "key"}
LOGIN = {"etcd-user": "trainer", "etcd-password-file": "pw"}


@pytest.mark.parametrize("source", ["cli", "environment", "file"])
def test_every_option_lands_from_every_source(source: str, files: Path) -> None:
    place = {"rdzv-endpoint": "etcd://h1", "rdzv-id": "j", "store-outage-grace": "10m"}
    argv, environ = settings.written(source, files, {**place, **TLS, **LOGIN})
    rendezvous = run_resolve(argv, environ).config.rendezvous
    assert rendezvous.store_outage_grace_s == 600.0
    assert rendezvous.etcd == EtcdConfig(
        ca=Path("ca"), cert=Path("cert"), key=Path("key"), user="trainer", password_file=Path("pw")
    )


@pytest.mark.parametrize(
    ("argv", "environ", "problem"),
    [
        ("--etcd-cert cert --etcd-ca ca", {}, "--etcd-cert 'cert': expected --etcd-key with it"),
        ("--etcd-key key --etcd-ca ca", {}, "--etcd-key 'key': expected --etcd-cert with it"),
        ("--etcd-cert cert --etcd-key key", {}, "--etcd-cert 'cert': expected --etcd-ca with it"),
        ("--etcd-insecure --etcd-ca ca", {}, "--etcd-insecure 'true': expected no TLS with it"),
        ("--etcd-user root", {}, "--etcd-user 'root': expected --etcd-password-file with it"),
        ("--etcd-password-file pw", {}, "--etcd-password-file 'pw': expected --etcd-user with it"),
        ("", {PASSWORD: CANARY}, f"{PASSWORD}: expected no such option any more; write the password into a file"),
        ("--etcd-user 'a b' --etcd-password-file pw", {}, "--etcd-user 'a b': expected 1 to 128 printable ASCII"),
        ("--etcd-ca ''", {}, "--etcd-ca '': expected a text"),
        ("--etcd-ca gone", {}, "--etcd-ca 'gone': expected a file that exists, can be read and is not empty"),
        ("--etcd-ca .", {}, "--etcd-ca '.': expected a file that exists"),
        ("--etcd-ca empty", {}, "--etcd-ca 'empty': expected a file that exists"),
        ("--etcd-ca ca --etcd-cert gone --etcd-key key", {}, "--etcd-cert 'gone': expected a file that exists"),
        ("--etcd-ca ca --etcd-cert cert --etcd-key gone", {}, "--etcd-key 'gone': expected a file that exists"),
        ("--etcd-user u --etcd-password-file gone", {}, "--etcd-password-file 'gone': expected a file that exists"),
        ("--store-outage-grace -1", {}, "--store-outage-grace '-1': expected a duration"),
        ("--etcd-insecure=perhaps", {}, "--etcd-insecure 'perhaps': expected true or false"),
    ],
)  # fmt: skip
def test_credentials_that_do_not_fit_together(
    argv: str, environ: dict[str, str], problem: str, files: Path
) -> None:
    (files / "empty").touch()
    (found,) = problems_of([*LOCAL, *shlex.split(argv)], environ)
    assert found.startswith(problem)


def test_a_file_that_cannot_be_read_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path("ca"))  # root may read everything
    (problem,) = problems_of([*LOCAL, "--etcd-ca", "ca"])
    assert problem.startswith("--etcd-ca 'ca': expected a file that exists, can be read")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
@pytest.mark.parametrize(("name", "option"), [("key", "--etcd-key"), ("pw", "--etcd-password-file")])
def test_secrets_that_others_can_read_are_refused(name: str, option: str, mode: int, files: Path) -> None:
    for readable_by_all in ("ca", "cert"):
        (files / readable_by_all).chmod(0o644)
    argv = [word for key, text in {**TLS, **LOGIN}.items() for word in (f"--{key}", text)]
    assert run_resolve([*LOCAL, *argv])
    (files / name).chmod(mode)
    (problem,) = problems_of([*LOCAL, *argv])
    assert problem == (
        f"{option} '{name}': expected a file that neither group nor others can read; run: chmod 600 {name}"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="the files belong to root only when the test does")
@pytest.mark.parametrize(("mode", "accepted"), [(0o440, True), (0o640, True), (0o444, False), (0o604, False)])
@pytest.mark.parametrize("name", ["key", "pw"])
def test_a_secret_of_roots_may_be_lent_to_a_group(
    name: str, mode: int, accepted: bool, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Secret's files in a pod belong to root and, with fsGroup, to a group of the agent's."""
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    (files / name).chmod(mode)
    argv = [*LOCAL, *(word for key, text in {**TLS, **LOGIN}.items() for word in (f"--{key}", text))]
    if accepted:
        assert run_resolve(argv)
    else:
        assert "neither group nor others" in problems_of(argv)[0]


@pytest.mark.parametrize("host", ["h1", "10.0.0.1", "[fe80::1]", "0.0.0.0", "localhost.evil.example"])
def test_plain_text_to_elsewhere_needs_a_word(host: str, files: Path) -> None:
    argv = f"--rdzv-endpoint etcd://{host} --rdzv-id j"
    assert "expected TLS" in problems_of(argv.split())[0]
    assert rendezvous_of(f"{argv} --etcd-insecure").etcd == EtcdConfig()
    assert rendezvous_of(f"{argv} --etcd-ca ca").etcd == EtcdConfig(ca=Path("ca"))


GIVEN = {**TLS, **LOGIN, "etcd-insecure": "true", "store-outage-grace": "5s"}


def test_the_options_of_etcd_need_etcd(files: Path) -> None:
    assert {option.name for option in ETCD_OPTIONS} == {*GIVEN}
    for backend in (["--rdzv-backend", "c10d"], [], ["--rdzv-endpoint", "node1"]):
        for name, text in GIVEN.items():
            (found,) = problems_of([*backend, f"--{name}={text}"])
            assert found.startswith(f"--{name} '{text}': expected --rdzv-backend etcd with it, not ")


def test_standalone_overrules_etcd_with_warnings(files: Path) -> None:
    resolved = run_resolve([*LOCAL, "--etcd-ca=ca", "--standalone"])
    assert resolved.config.rendezvous == RendezvousConfig(job_id="j")
    assert resolved.warnings == tuple(
        f"{origin} is ignored: --standalone overrules it" for origin in ("--rdzv-endpoint", "--etcd-ca")
    )


@pytest.mark.parametrize(
    "conf", ["cacert=ca,cert=cert,key=key", "ca_cert=ca,ssl_cert=cert,ssl_cert_key=key", "ca-cert=ca,cert=cert,key=key"]
)  # fmt: skip
def test_torchruns_spellings_of_certificates_are_read(conf: str, files: Path) -> None:
    resolved = run_resolve(["--rdzv-endpoint", "etcd://h1", *JOB, "--rdzv-conf", f"{conf},protocol=https"])
    assert resolved.config.rendezvous.etcd == EtcdConfig(ca=Path("ca"), cert=Path("cert"), key=Path("key"))
    assert resolved.warnings == ("--rdzv-conf protocol has no effect here and is ignored",)


def test_all_problems_at_once(files: Path) -> None:
    argv = "--rdzv-backend etcd --rdzv-endpoint h1:0,h2,h2 --etcd-key gone --etcd-insecure --etcd-user u"
    found = "\n".join(problems_of(argv.split()))
    for expected in (
        "expected ports from 1 to 65535",
        "rdzv-id (default): expected a name for this job",
        "--etcd-insecure 'true': expected no TLS with it",
        "--etcd-key 'gone': expected --etcd-cert with it",
        "--etcd-user 'u': expected --etcd-password-file with it",
        "--etcd-key 'gone': expected a file that exists",
    ):
        assert expected in found
    assert found.count("\n") == 5


def test_rules_with_an_unreadable_value_are_not_judged(files: Path) -> None:
    assert len(problems_of([*LOCAL, "--etcd-user", "a b", "--etcd-password-file", "pw"])) == 1
    assert len(problems_of(["--rdzv-backend", "redis", "--rdzv-endpoint", "h1,h2", "--etcd-ca", "gone"])) == 1
    assert len(problems_of(["--rdzv-backend", "etcd", "--rdzv-endpoint", "a/b", "--rdzv-id", "j"])) == 1


# --- Secrets


def test_a_password_itself_is_refused_wherever_it_is_and_not_shown(files: Path) -> None:
    file = files / "agent.toml"
    file.write_text(f"etcd-password = '{CANARY}'\n")
    for argv in (["--etcd-password", CANARY], [f"--etcd-password={CANARY}"], ["--config", str(file)]):
        (problem,) = problems_of([*LOCAL, *argv])
        assert "--etcd-password-file" in problem
        assert CANARY not in problem
    (problem,) = problems_of(LOCAL, {PASSWORD: CANARY})
    assert "--etcd-password-file" in problem
    assert CANARY not in problem


@hypothesis_settings(deadline=None)
@given(
    secret=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    form=st.sampled_from(["etcd://u:{}@h1", "u:{}@h1:2379", "etcd://{}@h1,h2", "etcd://h1,u:{}@h2/p", "etcd://h?p={}"]),
)  # fmt: skip
def test_a_password_in_the_endpoint_is_refused_and_not_shown(secret: str, form: str) -> None:
    text = form.format(CANARY + secret + CANARY)
    for argv, environ in ((["--rdzv-endpoint", text], {}), ([], {"PET_RDZV_ENDPOINT": text})):
        (problem,) = problems_of([*argv, *JOB], environ)
        assert CANARY not in problem


def test_a_password_in_a_file_that_is_wrong_otherwise_is_not_shown(files: Path) -> None:
    file = files / "agent.toml"
    file.write_text(f'rdzv-endpoint = ["etcd://u:{CANARY}@h1"]\n')
    (problem,) = problems_of(["--config", str(file), *JOB])
    assert "expected a text" in problem
    assert CANARY not in problem


# --- The printed settings


@pytest.mark.parametrize(
    "argv",
    [
        "--rdzv-endpoint etcd://h1,[::1]:7/p/q --etcd-insecure --rdzv-id j --store-outage-grace 90",
        "--rdzv-backend etcd-v3 --rdzv-endpoint h1,h2 --etcd-ca ca --etcd-cert cert --etcd-key key --rdzv-id j",
        "--rdzv-endpoint etcd://localhost --etcd-user u --etcd-password-file pw --rdzv-id j",
        "--rdzv-endpoint etcd://localhost --rdzv-id j --standalone",
    ],
)
def test_the_printed_settings_are_a_file_that_means_the_same(argv: str, files: Path) -> None:
    first = run_resolve(argv.split())
    again = settings.means_the_same(first, files)
    assert again.config == first.config
    assert again.warnings == ()


def test_the_url_is_named_as_the_origin_of_the_backend(files: Path) -> None:
    lines = run_resolve(LOCAL).settings.lines()
    assert any(line.split() == ["rdzv-backend", "=", '"etcd"', "#", "--rdzv-endpoint"] for line in lines), (
        lines
    )


def test_without_an_http_address_it_is_chosen_when_the_agent_starts() -> None:
    config: Config = run_resolve([]).config
    assert config.http_address is None
