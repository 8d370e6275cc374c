"""Secrets in texts that are shown to others."""

from __future__ import annotations

import json

import pytest

from elastic_agent.agent.output.masking import MASK, masked, secrets_in

CANARY = "c4n4ry-Value9"


@pytest.mark.parametrize(
    "text",
    [
        "API_TOKEN={}",
        "export WANDB_API_KEY={}",
        "password: {}",
        "--password {}",
        "--hf-token={}",
        "args: ['--token', '{}']",
        "{{'aws_secret_access_key': '{}', 'lr': 1}}",
        '{{"db_password": "{}"}}',
        "os.environ['MY_TOKEN'] = '{}'",
        "connect(password='{}')",
        "Authorization: Bearer {}",
        "headers={{'Authorization': 'Basic {}'}}",
        "postgres://user:{}@db/runs",
        "http://:{}@host/",
        "private_key = {}",
        "postgres://user:{}/with@and/{}@db/runs",
        "password = b'{}'",
        "password='it\\'s {}'",
        'password="it\'s {}"',
        "PASSWORD=a;{}",
        "connect(password=a,{})",
        '--api-key "two words {}"',
        "DB_PASSPHRASE={}",
        "MYSQL_PWD={}",
        "OPENAI_KEY={}",
        "AccountKey={}==;EndpointSuffix=x",
        "Cookie: session={}; other={}",
        "https://b.example/x?sv=1&sig={}",
        "https://s3.example/x?X-Amz-Signature={}&x=1",
        "npm_{}",
        "hf_{}",
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\n{}",
    ],
)
def test_what_looks_like_a_secret_is_not_shown(text: str) -> None:
    shown = masked(text.format(CANARY, CANARY))
    assert CANARY not in shown
    assert MASK in shown


def test_known_values_are_found_wherever_they_are_and_long_ones_first() -> None:
    assert masked(f"x{CANARY}y {CANARY}longer", [CANARY, f"{CANARY}longer"]) == f"x{MASK}y {MASK}"
    assert masked("short abc", ["abc"]) == "short abc"


@pytest.mark.parametrize("value", ['Ab"cd\\ef"gh12é$kk', 'it\'s \U0001f511 "x"', "two\nlines", "plain-value"])
def test_known_values_are_found_in_their_escaped_spellings(value: str) -> None:
    for text in (value, repr(value), ascii(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert masked(f"is {text}", [value]) in (f"is {MASK}", f"is '{MASK}'", f'is "{MASK}"')
    assert masked(repr(f"'\" {value}"), [value]) == f"'\\'\" {MASK}'"


@pytest.mark.parametrize(
    "text",
    [
        "loss 0.1, lr=0.001, tokens=4096, tokenizer: gpt2",
        "tokens/s: 12345",
        'File "/job/train.py", line 9 in step',
        "tcp 10.0.0.1:80 to 10.0.0.2:50000",
        "rank 3: in_collective, all_reduce, train.py:9 in step",
        "see https://example.org/a:b",
        "PWD=/home/me, keys: 3, missing key(s) in state_dict: ['a']",
    ],
)
def test_what_is_none_is_kept(text: str) -> None:
    assert masked(text) == text


def test_what_follows_a_secret_is_kept() -> None:
    assert masked("connect(password=a-b, lr=3)") == f"connect(password={MASK}, lr=3)"
    assert masked("{'token': 'x', 'lr': 3}") == f"{{'token': '{MASK}', 'lr': 3}}"
    assert masked("https://0123456789abcdef0123@sentry.example/4") == f"https://{MASK}@sentry.example/4"


def test_variables_that_are_secret_by_name() -> None:
    environ = {
        "HF_TOKEN": "a1",
        "PGPASSWORD": "b2",
        "TOKENIZERS_PARALLELISM": "c",
        "PASSWORD_FILE": "d",
        "HOME": "e",
    }
    assert secrets_in(environ) == {"a1", "b2"}


@pytest.mark.parametrize(
    "part",
    [
        "a",
        "token",
        "token-",
        "http://",
        "a://b:",
        "eyJaaaaaaaa-",
        "eyJaaaaaaaaa.",
        "sk-",
        "--key",
        "token ",
        "bearer ",
    ],
)
def test_it_comes_to_an_end_on_lines_that_are_made_to_take_long(part: str) -> None:
    """A pattern that looks at each part from each other takes hours for this."""
    text = part * (2**20 // len(part))
    assert len(masked(text)) <= 2 * len(text)
