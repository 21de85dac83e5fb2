"""Is a key that stands in the wrong place refused, and never repeated?"""

from __future__ import annotations

import json

import pytest

from rayserve.errors import RayserveError, SpecError, Where
from rayserve.spec import parse_spec
from rayserve.veil import holds_secret, may_be_key, veiled
from tests.bad_specs import ROOT
from tests.plans import planned

SPEC = (ROOT / "inventories" / "example" / "group_vars" / "all" / "cluster.yml").read_text()
ISSUED = [
    "sk-proj-SECRETSECRETSECRET1234",
    "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "ghp_0123456789abcdefABCDEF",
    "AKIAIOSFODNN7EXAMPLE",
    "sk-abcdefghijklmnop",
]
GENERATED = [
    "3f9a" * 16,
    "hY2k/9+aZ0bQ7tLmN4xW8g==",
    "demo-kZ0bQ7tLmN4xW8gA",
    "sk-lower-case-alone",
]
PLACES = {
    "model.hf_id": ("path: /srv/models/llama-3.1-405b-instruct-w4a16", "hf_id: {}"),
    "model.revision": ("model:\n", "model:\n    revision: {}\n"),
    "served_name": ("served_name: chat", "served_name: {}"),
    "env": ("  chat:\n", "  env: {{NCCL_DEBUG: {}}}\n  chat:\n"),
    "a list of engine_args": ("  chat:\n", "  engine_args: {{a: [{{b: {}}}]}}\n  chat:\n"),
    "an unknown key": ("  chat:\n", "  api_key: {}\n  chat:\n"),
    "endpoint.api_key_file": ("api_key_file: /etc/rayserve/api_keys", "api_key_file: {}"),
}


def told(old: str, new: str) -> str:
    """The message about the example with a part of it replaced."""
    assert old in SPEC
    with pytest.raises(SpecError) as caught:
        parse_spec(SPEC.replace(old, new, 1), "cluster.yml")
    return caught.value.message() + str(caught.value.as_dict())


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("key", ISSUED)
def test_a_key_in_the_spec_is_refused_and_not_repeated(place, key):
    """Wherever it stands, the message says where a key belongs, and quotes no part of it."""
    message = told(place[0], place[1].format(key))
    assert "the form of a key" in message
    assert "endpoint.api_key_file" in message
    assert key[8:] not in message


@pytest.mark.parametrize(
    "line",
    [
        "  {}: x\n",
        "  env: {{{}: 1}}\n",
        "  env: {{{}: {{a: 1}}}}\n",
        "  engine_args: {{{}: 1}}\n",
        "  engine_args: {{compilation_config: {{{}: 1}}}}\n",
    ],
)
@pytest.mark.parametrize("key", ISSUED)
def test_a_key_that_stands_as_a_key_of_the_file_is_not_repeated(line, key):
    """Neither what was found nor the place, also in JSON, shows it."""
    config = json.loads((ROOT / "inventories" / "example" / "model" / "config.json").read_text())
    with pytest.raises(RayserveError) as caught:
        planned(SPEC.replace("  chat:\n", line.format(key) + "  chat:\n", 1), config)
    assert key[8:] not in caught.value.message() + str(caught.value.as_dict())
    assert "(not shown)" in str(caught.value.where)


@pytest.mark.parametrize("key", GENERATED)
@pytest.mark.parametrize("profile", ["production", "local"])
def test_a_key_in_place_of_its_file_is_not_repeated(monkeypatch, key, profile):
    """Random text as `api_key_file` is taken for a key, also where a relative path would do."""
    monkeypatch.setitem(
        globals(), "SPEC", SPEC.replace("profile: production", f"profile: {profile}")
    )
    message = told("api_key_file: /etc/rayserve/api_keys", f'api_key_file: "{key}"')
    assert "the path of a file with keys" in message
    assert key[8:] not in message


@pytest.mark.parametrize("name", ["api_key", "api_keys", "key"])
def test_a_key_under_another_name_is_not_renamed_alone(name):
    """The message about a misnamed key says that a file holds it: renamed, the key were a path."""
    message = told("api_key_file: /etc/rayserve/api_keys", f"{name}: whatever-it-may-be")
    assert "put API keys in a file on every host" in message
    assert "whatever-it-may-be" not in message


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl-keyfile", "ssl_certfile"])
def test_the_key_of_a_certificate_is_no_key_of_the_api(name):
    """Under `endpoint` too, files of TLS are answered with the gateway, which ends it."""
    message = told("api_key_file: /etc/rayserve/api_keys", f"{name}: /etc/tls.pem")
    assert "TLS ends at the gateway" in message
    assert "API keys" not in message


@pytest.mark.parametrize("value", ["just-lower-case-words", "./keys"])
def test_production_proposes_no_relative_key_file(value):
    """What is no absolute path may be a key: it is not repeated, nor made into a path."""
    message = told("api_key_file: /etc/rayserve/api_keys", f"api_key_file: {value}")
    assert "its path: /etc/rayserve/api_keys" in message
    assert value not in message
    assert "./" not in message


@pytest.mark.parametrize(
    "path",
    ["/etc/rayserve/api_keys", "keys", "secrets/API-keys-2026.txt", "./Keys2026ForTheGateway"],
)
def test_a_path_is_no_key(path):
    """A folder, a dot or a short name is that of a file."""
    assert not may_be_key(path)


@pytest.mark.parametrize(
    "text",
    [
        "/srv/models/sk-Something-Long-2026",
        "hf_quant_config.json",
        "meta-llama/Llama-3.1-405B-Instruct",
        "96d9c134141125b651234517214ac9b7808932148776464d8e8b3685161d23fd",
        "https://hub.internal:8443/models",
        "task-Specific-Model-2026",
    ],
)
def test_names_and_digests_are_no_secrets(text):
    """Paths, ids, digests and URLs without a password are shown."""
    assert not holds_secret(text)


def test_an_error_repeats_no_key():
    """Every error drops what has the form of a key from all of its parts."""
    key = ISSUED[0]
    error = RayserveError(f"a {key}", found=f"'{key}'", do=f"write {key}", where=Where(key))
    for text in (error.message(), str(error), str(error.as_dict())):
        assert "SECRET" not in text
    assert veiled("https://me:hunter2@hub/x") == "https://(not shown)@hub/x"
