"""Is a wrong cluster.yml refused with one helpful message, and a right one read as written?"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayserve.described import descriptions
from rayserve.documents import MAX_BYTES, load_document
from rayserve.errors import SpecError
from rayserve.spec import ClusterSpec, absolute_paths, parse_spec
from rayserve.spec.rules import RULES
from rayserve.spec.words import section_of
from tests.bad_specs import CASES, ROOT, load
from tests.yaml_text import load_yaml

BAD = load()
BASE = load_yaml(CASES.read_text())["base"]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_bad_spec_is_refused(case):
    """One mistake gives one error of the right kind, on the right line, that says what to do."""
    error = case.refusal
    assert error is not None, "the spec passed"
    assert type(error).__name__ == case.error
    assert case.expect in error.message()
    assert error.needed
    assert error.found
    assert error.do
    assert error.where is not None
    if case.line is not None:
        assert error.where.line == case.line


def test_the_table_of_bad_specs_covers_what_it_should():
    """Enough distinct mistakes, each told apart by its own message."""
    assert len(BAD) >= 100
    assert len({case.name for case in BAD}) == len(BAD)
    needed = {error.needed for case in BAD if (error := case.refusal) is not None}
    assert len(needed) >= 60


def test_every_rule_has_a_bad_spec():
    """No rule stands untested: each is the first that some spec of the table breaks."""
    broken = {rule.__name__ for case in BAD for rule in _first_broken(case.text)}
    assert broken == {rule.__name__ for rule in RULES}


def _first_broken(text: str) -> list[Any]:
    try:
        spec = ClusterSpec.from_document(load_document(text, "cluster.yml"))
    except (KeyError, ValueError, SpecError):
        return []  # refused before any rule
    broken = (rule for rule in RULES if next(rule(spec), None) is not None)
    return [rule for rule in [next(broken, None)] if rule is not None]


def test_good_spec_is_read_as_written():
    """Values stand where they were written; the rest has defaults."""
    spec = parse_spec(BASE, "cluster.yml")
    assert spec.limits.max_model_len == 16384
    assert spec.limits.max_num_seqs == "auto"
    assert spec.node_pools[0].gpus_per_host == 8
    assert spec.endpoint.ingress == "haproxy"
    assert spec.where("limits", "max_model_len").line == 14
    assert spec.where("limits", "max_num_seqs").line == 13


RELATIVE = {
    "name": "laptop",
    "profile": "local",
    "state_dir": "state",
    "node_pools": [{"name": "laptop", "hosts": 1, "gpu": "cpu", "gpus_per_host": 1}],
    "model": {"path": "../model", "served_name": "m", "config": "model/config.json"},
    "chat": {"template_file": "chat.jinja"},
    "endpoint": {"api_key_file": "/etc/keys"},
    "lora": {"adapters": [{"name": "a", "path": "./lora/a"}]},
}


def test_relative_paths_are_completed():
    """What lies on the hosts gets the folder of cluster.yml; an absolute path stays, as does config."""
    spec = parse_spec(yaml.safe_dump({"rayserve_cluster": RELATIVE}), "cluster.yml")
    full = absolute_paths(spec, "/home/someone/cluster")
    assert full.state_dir == "/home/someone/cluster/state"
    assert full.model.path == "/home/someone/model"
    assert full.chat.template_file == "/home/someone/cluster/chat.jinja"
    assert full.lora.adapters[0].path == "/home/someone/cluster/lora/a"
    assert full.endpoint.api_key_file == "/etc/keys"
    assert full.kv_offload.nvme_dir == ""
    assert full.model.config == "model/config.json"
    assert full.where("model", "path") == spec.where("model", "path")


def test_every_path_of_a_spec_is_completed():
    """No field that is called a path, a file or a folder on the hosts is forgotten."""
    full = absolute_paths(ClusterSpec.model_validate(_all_paths("x")), "/f").model_dump()
    assert full == ClusterSpec.model_validate(_all_paths("/f/x")).model_dump()


def _all_paths(path: str) -> dict[str, Any]:
    names = {
        (key, name)
        for key, field in ClusterSpec.model_fields.items()
        if (section := section_of(field)) is not None
        for name in section.model_fields
        if name.endswith(("_file", "_dir", "path"))
    }
    tree: dict[str, Any] = {**RELATIVE, "state_dir": path}
    tree["lora"] = {"adapters": [{"name": "a", "path": path}]}
    for key, name in names:
        tree[key] = {**tree.get(key, {}), name: path}
    return tree


def test_a_spec_does_not_change():
    """A spec is a value: nobody rewrites it after it was checked."""
    spec = parse_spec(BASE, "cluster.yml")
    with pytest.raises(ValueError, match="frozen"):
        spec.seed = 3


@pytest.mark.parametrize("name", ["demo", "example"])
def test_shipped_specs_are_good(name):
    """The specs that we ship parse."""
    path = ROOT / "inventories" / name / "group_vars" / "all" / "cluster.yml"
    assert parse_spec(path.read_text(), str(path)).name == name


def test_the_example_samples_coolly():
    """The example ships temperature <= 1 and a low top_p and top_k."""
    path = ROOT / "inventories" / "example" / "group_vars" / "all" / "cluster.yml"
    sampling = parse_spec(path.read_text(), str(path)).sampling
    assert sampling.temperature <= 1
    assert sampling.top_p <= 0.5
    assert 0 < sampling.top_k <= 20


def test_a_huge_file_is_refused_before_it_is_parsed():
    """Size is checked first, so that a hostile file costs nothing."""
    with pytest.raises(SpecError, match="256 KiB"):
        load_document("a: " + "x" * MAX_BYTES, "cluster.yml")


def test_secrets_do_not_fit_in_a_spec():
    """There is a file of keys, and no key for a key."""
    assert "api_key" not in ClusterSpec.model_json_schema()["$defs"]["Endpoint"]["properties"]


def test_every_key_is_documented():
    """The reference is made of these texts, so none may be missing."""

    def walk(model):
        for name, field in model.model_fields.items():
            inner = field.annotation
            assert (
                name in descriptions(model) or hasattr(inner, "model_fields") or "|" in str(inner)
            ), name
            if hasattr(inner, "model_fields"):
                assert inner.__doc__
                walk(inner)

    walk(ClusterSpec)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gives_a_spec_error_or_a_spec(text):
    """No text, however odd, ends in anything but a SpecError."""
    with pytest.raises(SpecError):
        parse_spec(text, "cluster.yml")


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.dates(),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_in_any_place_gives_a_spec_error_or_a_spec(data):
    """A good spec with one value replaced by anything is read, or refused with a SpecError."""
    tree = load_yaml(BASE)
    node = tree["rayserve_cluster"]
    keys = [*node, "sampling", "lora", "env", "engine_args", "timeouts", "rope_scaling"]
    key = data.draw(st.sampled_from(keys))
    inner = node.get(key)
    if isinstance(inner, dict) and data.draw(st.booleans()):
        node, key = inner, data.draw(st.sampled_from(list(inner)))
    node[key] = data.draw(LEAVES)
    with contextlib.suppress(SpecError):
        assert parse_spec(yaml.safe_dump(tree, allow_unicode=True), "cluster.yml").name


EXAMPLE = (ROOT / "inventories/example/group_vars/all/cluster.yml").read_text(encoding="utf-8")
ADVICE = {
    "a number of replicas": ("replicas", "2", "write `replicas: {min: 2, max: 2}`"),
    "a model's name": ("model", "llama", "write `model: {path: /…/llama, served_name: llama"),
    "a model's id": ("model", "org/name", "write `model: {hf_id: org/name, served_name: name}`"),
    "a model's folder": ("model", "/srv/m", "write `model: {path: /srv/m, served_name: m"),
    "no model": ("model", None, "add `model: {path: "),
    "no weights": (
        "model",
        "{served_name: a}",
        "write one of: path (a folder on every host), hf_id",
    ),
    "a page as the id": (
        "model",
        "{served_name: a, hf_id: 'https://hub.example/org/name/tree/main'}",
        "write org/name",
    ),
    "a pool without a list": ("node_pools", "{name: gpu, hosts: 1}", "write a list: `- ` before"),
    "pools by name": ("node_pools", "{gpu: {hosts: 1}}", "what names it as its key `name`"),
    "a pool's name": ("node_pools", "[gpu]", "write a mapping, with keys of: name, hosts"),
    "a text as a section": (
        "precision",
        "bfloat16",
        "write a mapping under `precision:`, with keys",
    ),
    "vLLM's argument": ("tensor_parallel_size", "8", "write `parallelism.tensor`"),
    "vLLM's flag": ("enforce-eager", "true", "write `scheduling.cuda_graphs`"),
    "an old argument": ("swap_space", "4", "write `kv_offload.cpu_gib`"),
    "a key of the API": ("api_key", "whatever", "put API keys in a file on every host"),
    "memory in TB": (
        "node_pools",
        "[{name: gpu, hosts: 1, gpu: cpu, gpus_per_host: 1, memory_gib: 1TB}]",
        "write 931\n",
    ),
}


@pytest.mark.parametrize("key, value, expect", ADVICE.values(), ids=ADVICE)
def test_what_stands_for_a_section_is_told_as_what_to_write(key, value, expect):
    """A section that is missing, a plain value in its place, or a key of vLLM's gets text to write."""
    data = yaml.safe_load(EXAMPLE)
    data["rayserve_cluster"].pop(key, None)
    text = yaml.safe_dump(data, sort_keys=False)
    text += f"  {key}: {value}\n" if value is not None else ""
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "cluster.yml")
    assert expect in caught.value.message() + "\n"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "text, hf_id, revision",
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B", ""),
        (
            f"https://hub.example/org/of-a-longer-name/commit/{COMMIT}",
            "org/of-a-longer-name",
            COMMIT,
        ),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "Qwen/Qwen3-8B", "main"),
        ("Qwen/Qwen3-8B@main", "Qwen/Qwen3-8B", "main"),
        (f"Qwen/Qwen3-8B:{COMMIT.upper()}", "Qwen/Qwen3-8B", COMMIT),
    ],
)
def test_a_page_in_place_of_the_model_is_told_as_its_id(text, hf_id, revision):
    """What is told for a model's page, or its id with a revision, is a section that the spec takes."""
    data = yaml.safe_load(EXAMPLE)
    spec = data["rayserve_cluster"]
    spec["model"] = text
    with pytest.raises(SpecError) as caught:
        parse_spec(yaml.safe_dump(data), "cluster.yml")
    spec.update(yaml.safe_load(caught.value.do.split("`")[1]))
    if not revision:
        assert caught.value.do.endswith("in production with its commit as `revision`")
        spec["model"]["revision"] = COMMIT
    model = parse_spec(yaml.safe_dump(data), "cluster.yml").model
    assert (model.hf_id, model.revision) == (hf_id, revision or COMMIT)


@pytest.mark.parametrize(
    "text, expect",
    [
        ("https://huggingface.co/datasets/a/b", "write the id of a model: this is a dataset"),
        ("s3://bucket/models/a", "write a mapping under `model:`, with keys of: path, hf_id"),
    ],
)
def test_an_address_in_place_of_the_model_is_no_folder(text, expect):
    """The address of something else than a model's page is not told as a path."""
    data = yaml.safe_load(EXAMPLE)
    data["rayserve_cluster"]["model"] = text
    with pytest.raises(SpecError, match=expect):
        parse_spec(yaml.safe_dump(data), "cluster.yml")


def test_an_argument_beside_the_spec_is_told_by_its_key():
    """A vLLM argument outside `rayserve_cluster` names the key of the spec that it is."""
    with pytest.raises(SpecError, match=r"write `parallelism\.tensor`, under `rayserve_cluster:`"):
        parse_spec(f"tensor_parallel_size: 8\n{EXAMPLE}", "cluster.yml")
