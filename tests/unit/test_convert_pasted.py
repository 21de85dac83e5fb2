"""Is a command line as people paste it converted whole, told what is wrong with it, and planned?"""

from __future__ import annotations

import json
import re

import pytest

from rayserve.errors import DoesNotFitError, SpecError
from rayserve.planner import build_plan
from rayserve.planner.convert import convert
from rayserve.spec import parse_spec
from rayserve.spec.placeholders import PLACEHOLDER
from tests.bad_specs import CONFIG
from tests.errors_of import error_of
from tests.unit.converted import CASES, at, filled, pasted, spec_of


def test_pasted_command_keeps_what_works():
    """What has a key of its own stands there."""
    spec = spec_of(pasted().cluster_yml)
    wanted = {
        "model.path": "/path/to/400B-or-quantized-checkpoint",
        "model.served_name": "my-llm",
        "parallelism.tensor": 8,
        "parallelism.pipeline": 1,
        "limits.max_model_len": 16384,
        "limits.max_num_seqs": 128,
        "limits.max_num_batched_tokens": 8192,
        "limits.gpu_memory_utilization": 0.9,
        "precision.dtype": "bfloat16",
        "scheduling.prefix_caching": True,
        "scheduling.chunked_prefill": True,
        "scheduling.cuda_graphs": False,
        "seed": 42,
        "endpoint.host": "0.0.0.0",
        "endpoint.port": 8000,
        "node_pools.0.gpu": "A100-80GB-SXM",
        "node_pools.0.gpus_per_host": 8,
    }
    assert {key: at(spec, key) for key in wanted} == wanted
    assert at(spec, "precision.kv_cache_dtype") is None


@pytest.mark.parametrize(
    "severity, kind, flag, piece",
    [
        ("error", "never_existed", "--enable-flash-attn", "attention_backend"),
        ("error", "wrong_value", "--kv-cache-dtype", "auto"),
        ("error", "removed", "--swap-space", "0.18.0"),
        ("error", "removed", "--disable-log-requests", "0.17.0"),
        ("error", "removed", "vllm.entrypoints.api_server", "0.25.0"),
        ("error", "broken_continuation", "", "backslash"),
        ("warning", "hardware", "--quantization", "Marlin"),
        ("warning", "aim", "--enforce-eager", "9.3 to 9.7 ms"),
    ],
)
def test_pasted_command_is_told_what_is_wrong(severity, kind, flag, piece):
    """Each mistake of the command line is found once, with its date, price or replacement."""
    found = [f for f in pasted().findings if (f.severity, f.kind, f.flag) == (severity, kind, flag)]
    assert len(found) == 1
    assert piece in f"{found[0].what} {found[0].why} {found[0].do}"


def test_pasted_command_for_an_old_release():
    """For a release that takes a flag, its removal is a warning; what never was stays an error."""
    found = {(f.kind, f.flag): f for f in pasted(version="0.7.3").findings}
    assert found["removed", "--swap-space"].severity == "warning"
    assert "vLLM 0.7.3 takes it" in found["removed", "--swap-space"].what
    assert found["removed", "vllm.entrypoints.api_server"].severity == "warning"
    assert found["never_existed", "--enable-flash-attn"].severity == "error"
    assert ("version", "") not in found


def test_what_is_not_filled_in_is_refused():
    """The plan takes no placeholder: it names the key, and what belongs there."""
    command = "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 8"
    text = convert(command, gpu="A100-80GB-SXM").cluster_yml
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "cluster.yml")
    assert caught.value.where is not None
    assert caught.value.where.key == "rayserve_cluster.model.revision"
    assert PLACEHOLDER in caught.value.found
    assert caught.value.do.startswith("write it: Commit of `hf_id`")


def test_pasted_command_can_be_planned():
    """With the placeholders filled in, the planner accepts the file."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["num_hidden_layers"] = 80
    text = filled(pasted().cluster_yml)
    plan = build_plan(parse_spec(text, "cluster.yml"), config, "0" * 64)
    assert plan.replica.placement.tensor_parallel_size == 8
    assert plan.replica.placement.pipeline_parallel_size == 1


SIZED = re.compile(r"tensor|-tp|-pp|cudagraph|compilation|kv-|dtype|specul|lora-|rope|images?=")
"""Commands that say something of placement, memory or kernels, which the plan judges anew."""


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if SIZED.search(case["command"])],
    ids=lambda case: case["name"],
)
def test_what_is_free_of_errors_can_be_planned(case):
    """A file that no finding of severity error stands above is refused by the plan for memory alone."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 16  # so that most fit, and are planned to the end
    options = {
        key: case[key] for key in ("version", "aim", "hosts", "gpus_per_host") if key in case
    }
    gpu = "" if "--device cpu" in case["command"] else "H100-80GB-SXM"
    found = convert(case["command"], gpu=gpu, config=config, **options)
    spec = parse_spec(filled(found.cluster_yml), "cluster.yml", draft=True)
    error = error_of(build_plan, spec, config, "0" * 64)
    # Where a finding of severity error stands above, it says what is wrong.
    assert found.counts()["error"] or error is None or isinstance(error, DoesNotFitError)


def test_stretch_that_shortens_is_told_beside_its_flag():
    """A stretch to less than config.json's own positions is an error finding of the flag that asks for it."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    rope = '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 4096}'
    found = convert(
        f"vllm serve /srv/m -tp 8 --hf-overrides '{{\"rope_parameters\": {rope}}}'",
        gpu="A100-80GB-SXM",
        config=config,
    )
    told = [f for f in found.findings if f.severity == "error"]
    assert [(f.kind, f.flag) for f in told] == [("hardware", "--hf-overrides")]
    assert "131,072" in told[0].why


def test_key_across_the_cut_of_a_long_value_is_hidden():
    """A key that begins before the sixtieth character of a value, and ends after it, shows no part."""
    long = "chat" * 12 + " sk-Abcdef1234567890ABCDEF"
    told = str(convert(f"vllm serve /srv/m --served-model-name first '{long}' --dtype '{long}'"))
    assert "sk-A" not in told
    assert "not shown" in told


def test_price_of_eager_follows_the_layers():
    """The price per token is two all-reduces a layer."""
    found = convert(
        "vllm serve /srv/m -tp 8 --enforce-eager",
        config={"num_hidden_layers": 80, "num_attention_heads": 64},
    )
    why = next(item.why for item in found.findings if item.flag == "--enforce-eager")
    assert "5.9 to 6.2 ms" in why
    assert "80 layers" in why


def test_a_model_of_an_id_needs_no_copy_of_its_config():
    """For an id the line may go, and the spec is whole without it; for a folder it may not."""
    text = convert("vllm serve org/model", gpu="A100-80GB-SXM").cluster_yml
    line = "    config: config.json\n"
    assert "or remove this line: the plan then fetches it" in re.sub(r"[\s#]+", " ", text)
    assert line in text
    assert parse_spec(filled(text.replace(line, "")), "cluster.yml", draft=True).model.config == ""
    folder = convert("vllm serve /srv/m", gpu="A100-80GB-SXM").cluster_yml
    assert "remove this line" not in re.sub(r"[\s#]+", " ", folder)
    with pytest.raises(SpecError):
        parse_spec(filled(folder.replace(line, "")), "cluster.yml", draft=True)


@pytest.mark.parametrize(
    "command, served, shown",
    [
        ("vllm serve /srv/m --served-model-name 'my model'", "my-model", "my model"),
        ("vllm serve /srv/m --served-model-name 'a: b # c'", "a--b---c", "a: b # c"),
        ("vllm serve /srv/m --served-model-name '\u202ebad'", "bad", "\\u202ebad"),
        (f"vllm serve /srv/m --served-model-name {'x' * 130}", "x" * 128, "x" * 50),
        ("vllm serve /srv/m --served-model-name 模型", "chat", "模型"),
        ("vllm serve ./models/m", "m", "./models/m"),
        ("vllm serve srv/models/m", "m", "srv/models/m"),
        ("vllm serve s3://bucket/m", "m", "s3://bucket/m"),
        ("vllm serve $MODEL", "chat", "MODEL"),
        ("vllm serve /srv/m --served-model-name $NAME", "m", "NAME"),
        ("vllm serve /srv/m --served-model-name sk-Abcdef1234567890ABCDEF", "chat", "not shown"),
    ],
)
def test_a_name_that_changes_is_told(command, served, shown):
    """Where clients would not find the name that vLLM serves, a finding has both names."""
    found = convert(command)
    assert at(spec_of(found.cluster_yml), "model.served_name") == served
    (told,) = [item for item in found.findings if item.what.startswith("clients ask for")]
    assert told.kind == "not_the_same"
    assert f"`{served[:50]}" in told.what
    assert shown in told.what.partition("no longer for")[2]
    assert "\u202e" not in found.as_text()


@pytest.mark.parametrize(
    "command",
    ["vllm serve /srv/m --served-model-name a.b/c_d-1", "vllm serve org/m", "vllm serve gpt2"],
)
def test_a_name_that_stays_is_not_told(command):
    """A name that cluster.yml takes stands there as it is, without a finding."""
    found = convert(command)
    assert at(spec_of(found.cluster_yml), "model.served_name") == command.split()[-1]
    assert not any(item.what.startswith("clients ask for") for item in found.findings)


def test_an_adapter_with_another_name_is_told():
    """An adapter whose name cluster.yml does not take is left out alone, and not called an error of vLLM's."""
    found = convert("vllm serve /srv/m --enable-lora --lora-modules 'my sql=/srv/a' ok=/srv/b")
    adapters = at(spec_of(found.cluster_yml), "lora.adapters")
    assert adapters == [{"name": "ok", "path": "/srv/b"}]
    assert any("adapter `my sql`" in item.what for item in found.findings)
    assert "wrong_value" not in {item.kind for item in found.findings}
