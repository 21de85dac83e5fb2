"""Do the official `openai` and `anthropic` Python clients work against the running product?"""

from __future__ import annotations

import json

import anthropic
import httpx
import openai
import pytest

from benchmarks.census import wait_idle
from tests.engine.tools import (
    CHOSEN,
    CLAUDE_WEATHER,
    EXACT,
    GREEDY,
    QUESTION,
    SAYS_CALL,
    USAGE,
    VERDICT,
    WEATHER,
)
from tests.served import metrics


def ask(client, served, **options):
    """A chat completion of the one question."""
    return client.chat.completions.create(
        **{"model": served.model, "messages": QUESTION, "max_tokens": 16} | options
    )


# ── openai: answers ─────────────────────────────────────────────────────────────────────────────


def test_models(client, served):
    """The model list names the served model."""
    assert [model.id for model in client.models.list()] == [served.model]


def test_chat(client, served):
    """An answer has text, its exact number of tokens and a reason for its end."""
    answer = ask(client, served, **GREEDY)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


def test_a_stream_says_what_the_whole_answer_says(client, served):
    """A streamed answer has many events, the usage and finish reason, and the text of the whole answer."""
    whole = ask(client, served, max_tokens=48, **GREEDY)
    stream = ask(
        client,
        served,
        max_tokens=48,
        stream=True,
        stream_options=USAGE,
        **GREEDY,
    )
    events = list(stream)
    texts = [e.choices[0].delta.content for e in events if e.choices and e.choices[0].delta.content]
    # As many as tokens unless the machine is busy, which test_replica asks.
    assert 1 < len(texts) <= 48
    assert "".join(texts) == whole.choices[0].message.content
    assert events[-1].usage.completion_tokens == 48
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "length"


def test_tokens_arrive_while_the_answer_is_made(client, served):
    """The first tokens are here while the engine still works: nothing on the way holds them back."""
    stream = ask(client, served, max_tokens=1200, stream=True, stream_options=USAGE, **GREEDY)
    events = iter(stream)
    for _ in range(3):
        next(events)
    assert metrics(served)["vllm:num_requests_running"] == 1
    # Not events: under load vLLM puts several tokens into one.
    assert list(events)[-1].usage.completion_tokens == 1200


def test_leaving_a_stream_ends_its_generation(client, served):
    """When the client leaves, the engine stops working for it."""
    stream = ask(client, served, max_tokens=1900, stream=True, **GREEDY)
    next(iter(stream))
    assert metrics(served)["vllm:num_requests_running"] == 1
    stream.close()
    # The gauge shows the last step, so a short request is what makes it current.
    ask(client, served, max_tokens=1)
    wait_idle(served, timeout_s=3)


def test_a_forced_tool_is_called(client, served):
    """A tool that the request names is called, with arguments of its schema."""
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, served, tools=[WEATHER], tool_choice=choice, max_tokens=128, temperature=0)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Bern", "Oslo"}


def call_in_pieces(events) -> tuple[list[str], list[str]]:
    """Names and pieces of arguments of the tool calls in a stream."""
    deltas = [event.choices[0].delta for event in events if event.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or []]
    return [x.name for x in calls if x.name], [x.arguments for x in calls if x.arguments]


def test_a_forced_tool_is_called_in_pieces(client, served):
    """Streamed, the call's name comes once, and its arguments in pieces of one JSON object."""
    choice = {"type": "function", "function": {"name": "weather"}}
    options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 128, "temperature": 0}
    names, pieces = call_in_pieces(ask(client, served, stream=True, **options))
    assert names == ["weather"]
    assert len(pieces) > 1
    assert json.loads("".join(pieces))["city"] in {"Bern", "Oslo"}


def test_a_tool_that_the_model_chooses_is_called(client, served):
    """With `auto`, what the model says in its own format becomes a call, whole and streamed."""
    options = {"tools": [CHOSEN], "tool_choice": "auto", "max_tokens": 128, "temperature": 0}
    options["extra_body"] = SAYS_CALL
    answer = ask(client, served, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Oslo"},
    )
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    names, pieces = call_in_pieces(ask(client, served, stream=True, **options))
    assert names == ["weather"]
    assert json.loads("".join(pieces)) == {"city": "Oslo"}


def test_a_tool_that_the_model_does_not_choose_is_not_called(client, served):
    """With `auto` a plain text stays one."""
    message = ask(client, served, tools=[CHOSEN], tool_choice="auto", **GREEDY).choices[0].message
    assert message.content
    assert not message.tool_calls


def test_a_tool_s_answer_is_taken_back(client, served):
    """A conversation with a call and its result is a good prompt."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = ask(client, served, messages=messages, tools=[WEATHER], **GREEDY)
    assert answer.usage.completion_tokens == 16


def test_json_schema(client, served):
    """Output that a schema describes obeys it."""
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}
    answer = ask(client, served, response_format=form, max_tokens=128, temperature=0)
    content = json.loads(answer.choices[0].message.content)
    assert content["grade"] in {"a", "b"}
    assert isinstance(content["ok"], bool)


def test_logprobs(client, served):
    """Each token has its log probability and those of the likeliest ones; greedy takes the top."""
    answer = ask(client, served, logprobs=True, top_logprobs=3, **GREEDY)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 16
    for token in tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) >= 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_stop(client, served):
    """An answer ends before a stop text."""
    text = ask(client, served, max_tokens=32, **GREEDY).choices[0].message.content
    stop = text.split()[4]
    answer = ask(client, served, max_tokens=32, stop=[stop], **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


def test_n(client, served):
    """`n` gives so many answers to one question."""
    answer = ask(client, served, n=3, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_seed(client, served):
    """The same seed gives the same answer, another seed another one."""
    texts = [
        ask(client, served, temperature=1, seed=seed, max_tokens=24).choices[0].message.content
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_plan_s_sampling_holds_until_a_client_says_otherwise(client, served):
    """Without a temperature answers vary, as the plan says; with temperature 0 they do not."""
    free = {ask(client, served, max_tokens=32).choices[0].message.content for _ in range(3)}
    fixed = {
        ask(client, served, max_tokens=32, temperature=0).choices[0].message.content
        for _ in range(2)
    }
    assert len(free) > 1
    assert len(fixed) == 1


def test_completions(client, served):
    """The older API streams too."""
    options = {"model": served.model, "prompt": "The engine", "max_tokens": 8, **GREEDY}
    whole = client.completions.create(**options).choices[0].text
    events = client.completions.create(**options, stream=True)
    pieces = [event.choices[0].text for event in events if event.choices]
    assert 1 < len(pieces) <= 8
    assert "".join(pieces) == whole


def test_responses(client, served):
    """The Responses API answers whole and streamed."""
    options = {"model": served.model, "input": "hello", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.output_text
    kinds = [event.type for event in client.responses.create(stream=True, **options)]
    assert kinds[0] == "response.created"
    assert kinds.count("response.output_text.delta") > 1
    assert kinds[-1] in {"response.completed", "response.incomplete"}


def test_tokenize_and_back(served):
    """Tokens of a text give the text back."""
    with httpx.Client(base_url=served.url, headers=served.headers) as http:
        body = {"model": served.model, "prompt": "the first token", "add_special_tokens": False}
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        back = http.post("/detokenize", json={"model": served.model, "tokens": tokens}).json()
    assert back["prompt"] == "the first token"


# ── anthropic ───────────────────────────────────────────────────────────────────────────────────


def say(claude, served, **options):
    """A message of the Messages API."""
    return claude.messages.create(
        **{"model": served.model, "max_tokens": 16, "messages": QUESTION, **EXACT} | options
    )


def test_message(claude, served):
    """A message has text, a stop reason and its usage."""
    message = say(claude, served)
    assert message.type == "message"
    assert message.content[0].text
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 16


def test_message_stream(claude, served):
    """A streamed message says the same as the whole one, in more than one piece."""
    whole = say(claude, served).content[0].text
    with claude.messages.stream(
        model=served.model, max_tokens=16, messages=QUESTION, **EXACT
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert 1 < len(pieces) <= 16
    assert "".join(pieces) == whole == final.content[0].text
    assert final.stop_reason == "max_tokens"


def test_message_stops_at_a_sequence(claude, served):
    """A message ends before a stop sequence, and names the one it met."""
    whole = say(claude, served, max_tokens=32).content[0].text
    stop = whole.split()[4]
    message = say(claude, served, max_tokens=32, stop_sequences=["never said", stop])
    assert message.content[0].text == whole[: whole.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_message_calls_a_forced_tool(claude, served):
    """A tool that the request names is used with input of its schema."""
    choice = {"type": "tool", "name": "weather"}
    message = say(claude, served, tools=[CLAUDE_WEATHER], tool_choice=choice, max_tokens=128)
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert block.name == "weather"
    assert block.id
    assert block.input["city"] in {"Bern", "Oslo"}


def test_message_streams_a_tool_call(claude, served):
    """The client puts the streamed pieces of the input together."""
    options = {"tools": [CLAUDE_WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
    with claude.messages.stream(
        model=served.model, max_tokens=128, messages=QUESTION, **options, **EXACT
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (block,) = [block for block in final.content if block.type == "tool_use"]
    assert len(pieces) > 1
    assert block.name == "weather"
    assert block.input["city"] in {"Bern", "Oslo"}


def test_message_takes_a_tool_s_answer_back(claude, served):
    """A conversation with a use of a tool and its result is a good prompt."""
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = say(claude, served, messages=messages, tools=[CLAUDE_WEATHER])
    assert answer.usage.output_tokens == 16
    assert answer.usage.input_tokens > say(claude, served).usage.input_tokens


def test_message_tokens_are_counted(claude, served):
    """A prompt's tokens can be counted without an answer."""
    counted = claude.messages.count_tokens(model=served.model, messages=QUESTION)
    assert counted.input_tokens == say(claude, served).usage.input_tokens


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


def test_400(client, claude, served):
    """A wrong value is the client's BadRequestError, with the message that names it."""
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, served, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="max_tokens") as beyond:
        ask(client, served, max_tokens=10**6)
    assert beyond.value.body["code"] == 400
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        say(claude, served, max_tokens=2049)


def test_401(client, claude, served):
    """A wrong key is the client's AuthenticationError."""
    with pytest.raises(openai.AuthenticationError, match="API key"):
        ask(client.with_options(api_key="wrong"), served)
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        say(claude.with_options(api_key="wrong"), served)


def test_404(client, claude, served):
    """An unknown model is the client's NotFoundError."""
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ask(client, served, model="unknown")
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        say(claude, served, model="unknown")


def test_429(client, claude, served, door):
    """A full queue is the client's RateLimitError with Retry-After; what runs is not disturbed."""
    door(max_in_flight=1, max_queued=0)
    stream = ask(client, served, max_tokens=1500, stream=True, stream_options=USAGE, **GREEDY)
    events = iter(stream)
    next(events)
    with pytest.raises(openai.RateLimitError, match="queue") as refused:
        ask(client, served)
    assert int(refused.value.response.headers["retry-after"]) > 0
    with pytest.raises(anthropic.RateLimitError, match="queue"):
        say(claude, served)
    assert list(events)[-1].usage.completion_tokens == 1500
    assert ask(client, served).choices


def test_503(client, claude, served, door):
    """A draining replica answers 503 with Retry-After, and lets a running stream end."""
    stream = ask(client, served, max_tokens=1900, stream=True, **GREEDY)
    events = iter(stream)
    next(events)
    door(admit=False)
    with pytest.raises(openai.InternalServerError, match="going away") as refused:
        ask(client, served)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) > 0
    with pytest.raises(anthropic.APIStatusError) as also:
        say(claude, served)
    assert also.value.status_code == 503
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
