"""How fast does the first answer come, seen from the official OpenAI client?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rayserve.errors import StartError

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """One streamed chat answer and its times."""

    text: str
    prompt_tokens: int
    answer_tokens: int
    events: int
    """Stream events that carried text: as many as tokens when nothing batches them."""
    ttft_s: float
    """From sending the request to the first text."""
    decode_s: float
    """From the first text to the last."""

    @property
    def tokens_per_s(self) -> float:
        """Speed of decode: the first token is prefill's."""
        return (self.answer_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


def stream_answer(
    base_url: str,
    api_key: str,
    model: str,
    question: str,
    *,
    max_tokens: int,
    show: Callable[[str], None],
) -> Answer:
    """Ask one question and hand each piece of the answer to `show` as it arrives.

    Raises:
        StartError: the service refused the request, or the stream broke.
    """
    import httpx
    from openai import OpenAI, OpenAIError

    # trust_env: no proxy from the environment stands between a process and its own machine.
    http = httpx.Client(trust_env=False, timeout=TIMEOUT_S)
    pieces: list[str] = []
    usage = None
    first = last = 0.0
    with OpenAI(base_url=base_url, api_key=api_key, http_client=http, max_retries=0) as client:
        try:
            # It loads its own code at first use, which is not the service's time.
            client.models.list()
            create = client.chat.completions.create
            began = time.monotonic()
            stream = create(
                model=model,
                messages=[{"role": "user", "content": question}],
                max_tokens=max_tokens,
                stream=True,
                stream_options={"include_usage": True},
            )
            for event in stream:
                usage = event.usage or usage
                piece = event.choices[0].delta.content if event.choices else None
                if piece:
                    last = time.monotonic()
                    first = first or last
                    pieces.append(piece)
                    show(piece)
        except (OpenAIError, httpx.HTTPError) as error:
            raise StartError(
                f"a streamed chat answer from {base_url}", found=f"{type(error).__name__}: {error}"
            ) from error
    if usage is None or not pieces:
        raise StartError(
            f"a streamed chat answer from {base_url}", found="a stream without text or usage"
        )
    return Answer(
        text="".join(pieces),
        prompt_tokens=usage.prompt_tokens,
        answer_tokens=usage.completion_tokens,
        events=len(pieces),
        ttft_s=first - began,
        decode_s=last - first,
    )
