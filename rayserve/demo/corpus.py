"""What text does the demo model's tokenizer learn its merges from?

Plain prose about serving a language model, so that ordinary English about this subject takes few
tokens. It is part of the package because the demo downloads nothing.
"""

from __future__ import annotations

CORPUS = """\
A language model is a function from tokens to probabilities. It reads a sequence, and for each place
in that sequence it says how likely every word of its vocabulary is to come next. To write an answer
the engine picks one of these words, adds it to the sequence, and asks again. That is all: the rest
of the work is to do this quickly, for many people at once, on machines that cost a great deal.

The first part of a request is called prefill. All tokens of the prompt go through the layers
together, so the arithmetic units are busy and the time grows with the length of the prompt. The
second part is called decode. Here one token goes through the layers at a time, and every weight must
be read from memory for it. The speed of decode is therefore the speed of memory, not of arithmetic,
and the cure is a batch: eight readers share one pass over the weights almost for free.

What the reader notices first is the time to the first token. What the reader notices next is the
pause between tokens. A good service keeps both small. It does not promise the highest throughput;
it promises that a question asked at noon gets an answer as quickly as a question asked at midnight.

Attention needs the keys and values of all earlier tokens. They are kept in a cache, which is cut
into blocks of equal size, so that memory is never lost between requests of different length. When
two prompts begin alike, as prompts with the same system message do, their blocks may be shared. When
the cache is full, a request must wait, or give its blocks back and start again later.

A model with four hundred billion parameters does not fit on one processor. Its matrices are split
by columns and by rows over eight of them, and after each layer the partial sums are added together
through fast links. If one of the eight is slow, all wait for it. If one of the eight fails, the
whole group stops. So a replica is a gang: it is placed together, started together, watched together
and stopped together, and half a gang is worth nothing.

Before a replica starts, someone should prove that it fits. Weights take so many bytes, activations
take so many more, graphs and buffers take the rest, and what remains holds the cache. Divide it by
the bytes of one token and you know how long a conversation may become and how many may run side by
side. A plan that has been checked on paper saves an hour of loading and a morning of surprise.

Loading takes minutes. During those minutes nobody is served, unless another host has room for a
second copy. The careful operator asks first what a change will restart, how long the silence will
last, and how to return. Then the old replica finishes the streams that it has begun, refuses new
ones politely, and leaves. The new one reads its weights, warms its kernels with a real prompt,
answers a few known questions, and only then receives visitors. If it fails, the last good revision
comes back by itself, and the journal says why.

Health is not a green light. A process may answer its health check while its workers hang inside a
collective operation that will never end. Better evidence is progress: steps were made, tokens came
out, a small probe returned in time. One missing signal is a suspicion; two are a reason to act. And
before anything is killed, the evidence is written down: stacks, last lines of the log, messages of
the kernel, temperature and errors of each device.

The door in front of the engine is strict. It knows its keys, it counts what is running, and it
limits what may wait. A visitor beyond the limit hears at once that the house is full and when to
try again, because a long queue is only a slow refusal. A request that is too large, that asks for
too many choices, or that names a path nobody wrote down, is turned away with a clear message, and
the engine never sees it. When a visitor hangs up, the work for that visitor ends too.

Here is a short conversation. What is the capital of France? The capital of France is Paris. How far
is the moon? The moon is about three hundred and eighty thousand kilometres away. Please write a
short poem about the sea. The sea is wide, the sea is old, it keeps the stories it is told; the wind
may ask, the gull may cry, the sea gives back the evening sky. Thank you, that was lovely. You are
welcome! Is there anything else I can help you with today?

Numbers and code belong to the language as well. In the year 2024 a cluster of 16 nodes, each with 8
devices of 80 gigabytes, held 10240 gigabytes in total; 95 percent of requests began within 450
milliseconds, 99 percent within 1.2 seconds. A function looks like this: def add(first, second):
return first + second. A list looks like this: [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]. An object looks
like this: {"name": "get_weather", "arguments": {"city": "Berlin", "unit": "celsius", "days": 7}}.
Another looks like this: {"type": "object", "properties": {"title": {"type": "string"}, "count":
{"type": "integer"}, "done": {"type": "boolean"}, "value": null, "ok": true, "bad": false}}.

People ask about many other things: about bread and butter, music and mathematics, gardens in April,
trains across mountains, the colour of autumn leaves, how bees find flowers, why bridges stand, which
planet has rings, when the library opens, who painted that ceiling, where rivers begin. They want
help with letters, recipes, holidays, homework, contracts, spreadsheets, speeches, jokes and names
for kittens. Some write in haste, some in anger, some late at night. Some paste a whole book and ask
for its meaning in one sentence. Each of them deserves a correct, kind and timely reply.

An engineer keeps a notebook. Monday: measured the baseline three times, quiet machine, median and
spread. Tuesday: changed exactly one thing, measured again, wrote down the difference. Wednesday:
found that the difference was noise. Thursday: found the true cause, a timer somebody had chosen long
ago for another purpose. Friday: removed the timer, added a test, explained the decision on one page.
Good engineering is patient. It prefers simple parts with honest names, limits that are visible, and
failures that explain themselves to whoever is awake.
"""
