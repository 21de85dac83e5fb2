"""Is the escape hatch open for what vLLM takes, and shut for what the toolkit owns?"""

from __future__ import annotations

import re

import pytest

from rayserve.engine import VLLM_VERSION, check_value, load_snapshot, validate, validate_env
from rayserve.engine.flags import changes
from rayserve.errors import EngineArgumentError
from rayserve.owned import (
    CODE_ENV,
    OWNED_ARGS,
    OWNED_ENV,
    REMOVED_ARGS,
    REMOVED_ENV,
    REMOVED_KEYS,
    env_owner,
)
from rayserve.planner.arguments import engine_args
from tests.errors_of import error_of
from tests.golden_specs import SPECS, plan_of


def test_snapshot_is_of_the_pinned_version():
    """The file that is read belongs to the pin."""
    assert load_snapshot().version == VLLM_VERSION
    assert len(load_snapshot().engine) > 200
    assert len(load_snapshot().frontend) > 50


def test_every_owned_argument_exists():
    """The list of owned arguments has no stale name: each is one of the pinned vLLM's."""
    assert [name for name in OWNED_ARGS if load_snapshot().find(name) is None] == []


def test_every_owned_vllm_variable_exists():
    """The same for environment variables under vLLM's prefix."""
    known = load_snapshot().env | {"VLLM_USAGE_STATS_SERVER"}
    assert [name for name in OWNED_ENV if name.startswith("VLLM_") and name not in known] == []


def test_no_removed_argument_exists():
    """An argument that is listed as removed is gone indeed."""
    assert [name for name in REMOVED_ARGS if load_snapshot().find(name) is not None] == []


def test_each_gone_key_is_answered_with_one_that_vllm_has():
    """A key that was renamed is no key of the pinned vLLM, and what is told to be written is."""
    for path, do in REMOVED_KEYS.items():
        name, *outer, key = path.split(".")
        value = {key: 1}
        for one in reversed(outer):
            value = {one: value}
        with pytest.raises(EngineArgumentError) as caught:
            validate(name, value)
        assert (caught.value.do, caught.value.found) == (do, f"`{path}`")
        told = re.findall(r"`(\w+)", do)
        assert told or do.startswith("leave it out"), path
        assert set(told) <= set(load_snapshot().find(name).keys_in(tuple(outer)))


def test_a_level_of_compilation_is_told_to_be_a_mode():
    """`level: 3`, as many pages have it, is `mode: 3` now, and that is accepted."""
    with pytest.raises(EngineArgumentError) as caught:
        validate("compilation_config", {"level": 3})
    assert caught.value.do == "write `mode`"
    assert error_of(validate, "compilation_config", {"mode": 3}) is None


def test_each_gone_variable_is_answered_with_what_took_its_place():
    """A variable of an earlier release is ignored today: an argument of the pinned vLLM is told instead."""
    assert set(REMOVED_ENV) == set(changes().env)
    assert not set(REMOVED_ENV) & load_snapshot().env
    for name, do in REMOVED_ENV.items():
        assert error_of(validate_env, name, "FLASHINFER").do == do
        for argument, key in re.findall(r"`(\w+)(?:: \{(\w+))?", do):
            found = load_snapshot().find(argument)
            assert found is not None, argument
            assert not key or key in found.keys_in(())
    told = error_of(validate_env, "VLLM_ATTENTION_BACKEND", "FLASHINFER").do
    assert told == "write `attention_backend` under engine_args"
    assert error_of(validate, "attention_backend", "FLASHINFER") is None


@pytest.mark.parametrize("name", sorted(OWNED_ARGS))
def test_owned_argument_is_refused_with_what_to_do(name):
    """Each owned argument is refused, and the message names the key or the reason."""
    with pytest.raises(EngineArgumentError) as caught:
        validate(name, True)
    assert caught.value.do


@pytest.mark.parametrize("name", sorted(OWNED_ENV))
def test_owned_variable_is_refused_with_what_to_do(name):
    """Each owned environment variable is refused, and the message says why."""
    with pytest.raises(EngineArgumentError) as caught:
        validate_env(name, "1")
    assert caught.value.do


def test_every_argument_that_the_planner_sets_is_owned():
    """What the planner sets cannot be set a second time in engine_args."""
    # The last one is left to whoever writes it; the planner then sets none.
    written = {"max_logprobs", "compilation_config", "enable_force_include_usage",
               "enable_expert_parallel", "performance_mode"}  # fmt: skip
    for path in SPECS:
        replica = plan_of(path).replica
        names = {item.name for item in [*replica.engine_args, *replica.frontend_args]}
        assert names - written <= OWNED_ARGS.keys()
    assert engine_args.__doc__


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_logprobs", 5),
        ("async_scheduling", True),
        ("block_size", 32),
        ("attention_backend", "FLASHINFER"),
        ("compilation_config", {"cudagraph_capture_sizes": [1, 2]}),
        ("cudagraph_capture_sizes", [1, 2, 4]),
        ("performance_mode", "interactivity"),
        ("load_format", "dummy"),
        ("kv_cache_metrics_sample", 1),
        ("enable_force_include_usage", True),
        ("response_role", "assistant"),
        ("default_chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_accepted(name, value):
    """Arguments of engine and OpenAI server pass with a value of their type."""
    assert error_of(validate, name, value) is None


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_logprobs", True),
        ("max_logprobs", 1.5),
        ("async_scheduling", "yes"),
        ("async_scheduling", 1),
        ("performance_mode", "fast"),
        ("cudagraph_capture_sizes", 4),
        ("compilation_config", [1]),
        ("response_role", 5),
        ("max_logprobs", None),
    ],
)
def test_refused_value(name, value):
    """A value of the wrong type, or beyond a closed set, is refused."""
    with pytest.raises(EngineArgumentError, match=name):
        validate(name, value)


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("structured_outputs_config", {"reasoning_parser_plugin": "/x.py"}, "runs code"),
        ("structured_outputs_config", {"reasoning_parser": "qwen3"}, "`chat.reasoning_parser`"),
        ("reasoning_config", {"reasoning_parser": "qwen3"}, "`chat.reasoning_parser`"),
        ("compilation_config", {"inductor_passes": {"post": "os.system"}}, "import"),
        ("compilation_config", {"backend": "some.module.backend"}, "import"),
        ("ec_manager_config", {"encoder_cache_manager_cls": "some.module.Class"}, "import"),
        ("default_chat_template_kwargs", {"chat_template": "{{ x }}"}, "`chat.template_file`"),
        ("mm_processor_kwargs", {"trust_remote_code": True}, "runs code"),
        ("mm_processor_kwargs", {"image": [{"trust-remote-code": True}]}, "runs code"),
        ("model_loader_extra_config", {"s3_secret_access_key": "x"}, "read by many"),
        ("attention_config", {"backened": "FLASH_ATTN"}, "write `backend`"),
        ("compilation_config", {"pass_config": {"nonsense": 1}}, "one of: "),
    ],
)
def test_key_inside_a_mapping_is_refused(name, value, told):
    """A mapping is no way around what is owned, names no code and holds no secret or unknown key."""
    with pytest.raises(EngineArgumentError) as caught:
        validate(name, value)
    assert f"`{name}." in caught.value.found
    assert told in caught.value.do


@pytest.mark.parametrize(
    "name, value",
    [
        ("quantization_config", {"linear": {"weight": {"dtype": "fp8"}}}),
        ("default_chat_template_kwargs", {"seed": 1, "dtype": "x"}),
        ("compilation_config", {"mode": 3, "pass_config": {"fuse_norm_quant": True}}),
        ("custom_histogram_buckets", {"vllm:request_max_num_generation_tokens": [1.0]}),
    ],
)
def test_key_inside_a_mapping_is_accepted(name, value):
    """A key that means something else there than the argument of its name passes."""
    assert error_of(validate, name, value) is None


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_DEBUG",
        "NCCL_IB_HCA",
        "VLLM_LOGGING_LEVEL",
        "TOKENIZERS_PARALLELISM",
        "OMP_NUM_THREADS",
    ],
)
def test_accepted_variable(name):
    """Tuning variables pass."""
    assert error_of(validate_env, name, "1") is None


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "OPENAI_API_KEY", "S3_ACCESS_KEY_ID",
        "WANDB_KEY",
    ],
)  # fmt: skip
def test_secret_variable_is_refused(name):
    """Whatever is named like a secret has no place in a plan, and its value in no message."""
    with pytest.raises(EngineArgumentError, match=r"a secret, and plan\.yml") as caught:
        validate_env(name, "hunter2")
    assert "hunter2" not in str(caught.value)


def test_what_the_planner_sets_in_the_environment_is_owned():
    """`env` cannot undo a switch of the plan; only the CPU engine's threads may be tuned."""
    tunable = {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"}
    for path in SPECS:
        names = {item.name for item in plan_of(path).replica.env if item.reason}
        assert names
        assert {name for name in names if not env_owner(name)} <= tunable


def test_a_value_with_a_line_break_is_refused():
    """An environment file has one line a variable."""
    with pytest.raises(EngineArgumentError, match="one line"):
        validate_env("NCCL_DEBUG", "a\nb")


@pytest.mark.parametrize(
    "name, inside, beyond, limit",
    [
        ("cpu_offload_gb", 0, -0.5, "at least 0"),
        ("block_size", 16, 0, "more than 0"),
        ("watermark", 0.5, 1.0, "less than 1"),
        ("kv_cache_metrics_sample", 1, 1.5, "at most 1"),
        ("num_gpu_blocks_override", 1, 0, "at least 1"),
        ("seed", -1, 2**63, "64 bits"),
        ("mm_processor_cache_gb", 4, float("nan"), "a finite number"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_limit(name, inside, beyond, limit):
    """Limits of vLLM's configuration hold here as there; what no size can be is refused too."""
    argument = load_snapshot().find(name)
    assert argument.outside(inside) == ""
    error = error_of(check_value, argument, beyond)
    assert isinstance(error, EngineArgumentError)
    assert limit in error.needed


def told(check, *args) -> str:
    """What a refusal says to do."""
    with pytest.raises(EngineArgumentError) as raised:
        check(*args)
    return raised.value.do


@pytest.mark.parametrize(
    "check, args, instead",
    [
        (validate, ("logits_processor_pattern", "x"), OWNED_ARGS["logits_processors"]),
        (validate, ("hf_overrides_fn", "x"), OWNED_ARGS["hf_overrides"]),
        (
            validate,
            ("structured_outputs_config", {"reasoning_parse": "x"}),
            "chat.reasoning_parser",
        ),
        (validate_env, ("VLLM_SERVER_DEV_MOD", "1"), OWNED_ENV["VLLM_SERVER_DEV_MODE"]),
    ],
)
def test_a_misspelt_name_that_the_toolkit_owns_is_not_proposed(check, args, instead):
    """What the toolkit has in its place is told at once: the name itself would be refused next."""
    assert instead in told(check, *args)
    assert not told(check, *args).startswith("write `")


def test_no_name_near_to_an_argument_is_answered_with_an_owned_one():
    """Whatever the slip of the pen, `write ...` names what is accepted."""
    known = load_snapshot()
    for name in [*known.engine, *known.frontend]:
        do = told(validate, f"{name}_x", 1)
        if do.startswith("write `"):
            assert do.split("`")[1] not in OWNED_ARGS


@pytest.mark.parametrize("name", CODE_ENV)
def test_a_variable_that_loads_code_is_refused(name):
    """None of the variables that are known to load code, and that no host needs, is taken."""
    assert told(validate_env, name, "/tmp/x") == "leave it out: it loads code into the engine"


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "PYTHONHOME", "VLLM_CUDART_SO_PATH"]
)
def test_variables_that_load_code_are_known(name):
    """Those of the loader, of Python and of vLLM are among them."""
    assert name in CODE_ENV


@pytest.mark.parametrize("name", ["VLLM_NCCL_SO_PATH", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN"])
def test_the_nccl_of_a_network_may_be_named(name):
    """Hosts whose network needs an NCCL or a plugin of its own name it."""
    assert env_owner(name) == ""
    validate_env(name, "/opt/nccl/lib/libnccl.so.2")


def test_where_libraries_lie_may_be_said():
    """CUDA outside the usual folders is found by it."""
    assert env_owner("LD_LIBRARY_PATH") == ""
    validate_env("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
