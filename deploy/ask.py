"""Ask one question with the official OpenAI client, streaming: `python deploy/ask.py [URL [QUESTION]]`.

Without a URL, the deployment that is up is asked.

Exit code 1 if the answer to the default question does not name Paris.
"""

from __future__ import annotations

import sys
import time

from openai import APIConnectionError, APIError, OpenAI

from splitserve.launch.stage import running_url

QUESTION = "What is the capital of France?"


def main() -> int:
    base_url = sys.argv[1] if len(sys.argv) > 1 else running_url("http://127.0.0.1:8000") + "/v1"
    try:
        return ask(base_url)
    except APIConnectionError as e:
        fix = "splitserve status says what is up; splitserve up deploy/demo.toml --detach starts the demonstration"
        print(f"error: nothing answers at {base_url}: {e}\nfix: {fix}", file=sys.stderr)
        return 1


def ask(base_url: str) -> int:
    question = sys.argv[2] if len(sys.argv) > 2 else QUESTION
    client = OpenAI(base_url=base_url, api_key="not needed")
    model = client.models.list().data[0].id
    print(f"{model}: {question}")
    begun, first, answer, chunks = time.perf_counter(), 0.0, "", 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    try:
        for event in stream:
            text = event.choices[0].delta.content if event.choices else None
            if text:
                first = first or time.perf_counter()
                chunks += 1
                answer += text
                print(text, end="", flush=True)
    except APIError:
        print(flush=True)  # what went wrong begins a line of its own
        raise
    took = time.perf_counter() - begun
    print(f"\n({chunks} pieces, the first after {first - begun:.2f} s, all in {took:.2f} s)")
    return 0 if question != QUESTION or "Paris" in answer else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except APIError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
