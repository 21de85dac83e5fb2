"""What the clients are asked for: tools, answers of an exact form, and their settings."""

from __future__ import annotations

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
"""How a model of this parser calls the tool."""
SAYS_CALL = {"structured_outputs": {"choice": [CALL]}}
"""Makes the demo's model, which has no mind of its own, say exactly this."""
QUESTION = [{"role": "user", "content": "What does a reader notice first?"}]
EXACT = {"extra_body": {"temperature": 0}}
"""For the anthropic client, whose methods no longer take a temperature."""
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
USAGE = {"include_usage": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CHOSEN = {"type": "function", "function": WEATHER["function"] | {"strict": False}}
"""The same, of whose calls the engine does not enforce the form."""
CLAUDE_WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": WEATHER["function"]["parameters"],
    "strict": True,  # else the engine enforces the form of no call
}
VERDICT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "grade": {"type": "string", "enum": ["a", "b"]}},
    "required": ["ok", "grade"],
    "additionalProperties": False,
}
