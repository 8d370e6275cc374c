"""Small JSON files that show by themselves whether they are whole: the fields of a dataclass, a schema, a checksum."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ...codec import Invalid, load_object, plain, shown


def checksum(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def seal(schema: int, record: object, indent: int | None = None) -> bytes:
    return seal_fields({"schema": schema, **plain(record)}, indent)


def seal_fields(body: dict[str, Any], indent: int | None = None) -> bytes:
    return json.dumps({**body, "check": checksum(body)}, indent=indent).encode()


def unseal(raw: bytes, what: str, *schemas: int) -> tuple[int, dict[str, Any]]:
    """The schema, one of these, and the fields; `from_plain` makes the record of them. Raises Invalid."""
    body = load_object(raw, what)
    schema = body.get("schema")
    if type(schema) is not int or schema not in schemas:
        known = " and ".join(map(str, schemas))
        raise Invalid(f"{what} has schema {shown(schema)}, this version reads {known}")
    if body.pop("check", None) != checksum(body):
        raise Invalid(f"{what} does not match its own checksum")
    del body["schema"]
    return schema, body
