"""The embedded default: a tiny model made on the spot, served by the whole real stack.

run.py          check → model → plan → ray → serve → answer → stop
├── interrupts.py   Ctrl-C at any moment
├── progress.py     what a person sees
├── workdir.py      the demo's folder and its lock
├── host.py         memory, shared memory, ports
├── model.py        makes the model (numpy, tokenizers, safetensors), with corpus.py
├── cluster.py      cluster.yml → plan → Serve config
├── local_ray.py    a Ray of its own
│   ├── keeper.py       outlives the demo and stops everything
│   └── processes.py    which processes are ours, and how they end
├── logs.py         phases of the start, and why it failed
└── chat.py         one streamed answer through the openai client
"""

from __future__ import annotations
