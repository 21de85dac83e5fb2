"""Which programs stand around a command that starts vLLM?"""

from __future__ import annotations

import re

BESIDE = {
    ".", "apt", "apt-get", "cat", "cd", "clear", "conda", "conda-env", "curl", "date", "disown", "echo",
    "exit", "export", "git", "hf", "hostname", "huggingface-cli", "jobs", "kill", "ls", "mamba", "mkdir", "modelscope", "module",
    "nvidia-smi", "pip", "pip3", "ps", "pwd", "ray", "set", "sleep", "source", "tail", "ulimit", "unset", "uv",
    "wait", "wget", "which", "whoami",
}  # fmt: skip
"""Commands that prepare a start and say nothing of the server; noted and left out."""
WRAPPERS = {
    "env", "exec", "nice", "nohup", "numactl", "setsid", "stdbuf", "sudo", "taskset", "time", "uv",
    "chrt", "ionice", "poetry", "conda", "micromamba", "mamba", "cpulimit", "timeout", "srun", "screen",
    "apptainer", "singularity", "enroot", "kubectl", "nsys", "ncu", "opentelemetry-instrument", "pixi", "pipenv",
    "ray", "ssh", "systemd-run", "tmux", "unbuffer", "mpirun", "accelerate",
}  # fmt: skip
"""Programs that start another one, which stands behind their own options."""
CONTAINERS = {"docker", "podman", "nerdctl", "nvidia-docker"}
SHELLS = {"bash", "sh", "zsh", "/bin/bash", "/bin/sh"}
MOST_SHELLS = 2
"""A shell inside a shell inside a shell is not followed."""
DOCKER_SWITCHES = {
    "--rm", "-it", "-ti", "-i", "-t", "-d", "-itd", "-dit", "-tid", "--detach", "--interactive", "--tty",
    "--privileged", "--init", "--read-only", "-P", "--publish-all", "--no-healthcheck", "--oom-kill-disable",
}  # fmt: skip
"""Options of `docker run` that take no value."""
CLIENTS = re.compile(r"(?:.*/)?(?:python[\d.]*|pytest|bash|sh)")
"""What people run against a server or before it, on lines of their own."""
