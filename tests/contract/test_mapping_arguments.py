"""Is a mapping of `engine_args` refused for what the installed vLLM refuses in it, by its name?"""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from rayserve.engine import load_snapshot, validate
from rayserve.errors import EngineArgumentError
from rayserve.owned import OWNED_ARGS, OWNED_KEYS
from rayserve.plan import PLAN_KEY, NamedValue, Plan, parse_plan
from tests.errors_of import error_of

PLAN = Path(__file__).parents[1] / "golden" / "cpu-two-stages.plan.yml"
MAPPINGS = sorted(
    name
    for arguments in (load_snapshot().engine, load_snapshot().frontend)
    for name, argument in arguments.items()
    if "dict" in argument.kinds and name not in OWNED_ARGS
)
CLOSED = [name for name in MAPPINGS if load_snapshot().find(name).keys]


def plan_with(name: str, value: object, **replica_fields: object) -> Plan:
    """A plan that has one more engine argument, whatever its value; its revision is right."""
    plan = parse_plan(yaml.safe_load(PLAN.read_text()), str(PLAN))
    more = [*plan.replica.engine_args, NamedValue(name=name, value=copy.deepcopy(value))]
    replica = plan.replica.model_copy(update={"engine_args": more, **replica_fields})
    return plan.model_copy(update={"replica": replica, "revision": replica.revision})


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("attention_config", {"nonsense": 1}, "nonsense Unexpected keyword argument"),
        ("attention_config", {"backend": "FLASH"}, "Unknown attention backend: 'FLASH'"),
        ("compilation_config", {"mode": "banana"}, "Invalid compilation mode: banana"),
        ("compilation_config", {"cudagraph_mode": "banana"}, "BANANA"),
        ("compilation_config", {"pass_config": {"fuse_norm_quant": "x"}}, "pass_config.fuse_norm"),
        ("profiler_config", {"profiler": "banana"}, "Input should be 'torch'"),
        ("quantization_config", {"linear": {"weight": 1}}, "linear"),
    ],
)
def test_a_bad_mapping_is_our_error(name, value, reason):
    """What makes vLLM's parser end the process names the argument and vLLM's reason instead."""
    from rayserve.serving.engine import engine_namespace

    with pytest.raises(EngineArgumentError) as caught:
        engine_namespace(plan_with(name, value).replica)
    assert f"`{name}`" in caught.value.needed
    assert reason in caught.value.found
    assert f"`engine_args.{name}`" in caught.value.do


def test_check_args_names_a_bad_mapping(tmp_path):
    """`rayserve check args` ends with 2, the argument's name and vLLM's reason, and blames no install."""
    path = tmp_path / "plan.yml"
    (tmp_path / "config.json").write_text("{}")
    plan = plan_with("compilation_config", {"mode": "banana"}, model=str(tmp_path), content=[])
    path.write_text(yaml.safe_dump({PLAN_KEY: plan.as_dict()}))
    command = [sys.executable, "-m", "rayserve.cli", "check", "args", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert "`compilation_config`" in verdict["needed"]
    assert "Invalid compilation mode: banana" in verdict["found"]
    assert "check install" not in json.dumps(verdict)


@pytest.mark.parametrize("name", CLOSED)
def test_the_planner_refuses_no_key_that_vllm_takes(name):
    """A mapping whose keys the snapshot lists is one in which vLLM refuses another key."""
    from rayserve.serving.engine import engine_namespace

    # ValueError: vLLM's engine has `mamba_config`, its command line has not.
    with pytest.raises((EngineArgumentError, ValueError), match=name):
        engine_namespace(plan_with(name, {"no_such_key": 1}).replica)
    with pytest.raises(EngineArgumentError, match="no_such_key"):
        validate(name, {"no_such_key": 1})


def inner_keys(cls: type, outer: tuple[str, ...] = ()) -> typing.Iterator[tuple[str, ...]]:
    """Every key of a configuration class of vLLM's, with those of the classes in it."""
    from rayserve.engine.snapshot import _late_types, _members

    hints = typing.get_type_hints(cls, localns=_late_types(), include_extras=True)
    for field in dataclasses.fields(cls):
        if field.init and not field.name.startswith("_"):
            yield (*outer, field.name)
            for member in _members(hints[field.name]):
                if dataclasses.is_dataclass(member):
                    yield from inner_keys(member, (*outer, field.name))


def nested(keys: tuple[str, ...]) -> object:
    """The mapping that sets the innermost of the keys."""
    value: object = "x"
    for key in reversed(keys):
        value = {key: value}
    return value


def test_no_mapping_names_code_or_what_is_owned():
    """In no configuration class of vLLM's is there a key, at any depth, that gets by what is owned."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rayserve.engine.snapshot import _late_types, _members

    hints = typing.get_type_hints(AsyncEngineArgs, localns=_late_types(), include_extras=True)
    code = ("_cls", "_plugin", "_class", "_module_path", "_file", "_passes")
    refused = set()
    for name in MAPPINGS:
        for cls in _members(hints.get(name)):
            if not dataclasses.is_dataclass(cls):
                continue
            for keys in inner_keys(cls):
                weights_own = (name, keys[-1]) == ("quantization_config", "dtype")
                owned = keys[-1] in OWNED_ARGS and not weights_own
                if owned or keys[-1].endswith(code):
                    error = error_of(validate, name, nested(keys))
                    assert error is not None, (name, keys)
                    assert ".".join((name, *keys)) in error.found
                    refused.add((name, keys[-1]))
    assert ("structured_outputs_config", "reasoning_parser_plugin") in refused
    assert ("ec_manager_config", "encoder_cache_manager_cls") in refused
    assert ("reasoning_config", "reasoning_parser") in refused


def test_every_owned_key_exists():
    """The list of owned keys has no stale name."""
    unknown = []
    for dotted in OWNED_KEYS:
        name, _, key = dotted.partition(".")
        argument = load_snapshot().find(name)
        assert argument is not None, name
        if argument.keys and key not in argument.keys:
            unknown.append(dotted)
    assert unknown == []


def test_vllm_imports_what_an_inductor_pass_and_a_backend_name():
    """Why both keys of `compilation_config` are owned: vLLM imports the code that they name."""
    import inspect

    from vllm.config import CompilationConfig

    source = inspect.getsource(CompilationConfig)
    assert "resolve_obj_by_qualname(self.backend)" in source
    assert "__import__(module)" in source
