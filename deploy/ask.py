"""Ask one question with the official OpenAI client, streaming: `python deploy/ask.py [URL [QUESTION]]`.

Without a URL, the deployment that is up is asked. Its API key, where it wants one, is found; another server's is given
by --api-key-file FILE or in the environment, as SPLITSERVE_API_KEY.

Exit code 1 if the answer to the default question does not name Paris.
"""

from __future__ import annotations

import argparse
import sys
import time

from openai import APIConnectionError, APIError, AuthenticationError, OpenAI

from splitserve.errors import ConfigError
from splitserve.launch.stage import running_key, running_url
from splitserve.net.keys import ENVIRONMENT, given_key

QUESTION = "What is the capital of France?"


def main() -> int:
    args = _parser().parse_args()
    base_url = args.url or running_url("http://127.0.0.1:8000") + "/v1"
    try:
        return ask(base_url, args.question, given_key("", args.api_key_file) or running_key(base_url))
    except ConfigError as e:
        print(f"error: {e.message}\nfix: {e.fix}", file=sys.stderr)
        return 2
    except AuthenticationError as e:
        print(f"error: {e.message}\nfix: --api-key-file FILE, or set {ENVIRONMENT}", file=sys.stderr)
        return 1
    except APIConnectionError as e:
        fix = "splitserve status says what is up; splitserve up deploy/demo.toml --detach starts the demonstration"
        print(f"error: nothing answers at {base_url}: {e}\nfix: {fix}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ask.py", description="ask one question, streaming", allow_abbrev=False)
    parser.add_argument("url", nargs="?", default="", help="with /v1; default: the deployment that is up")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument(
        "--api-key-file", default="", metavar="FILE", help="its first line that is no comment"
    )
    return parser


def ask(base_url: str, question: str, key: str) -> int:
    client = OpenAI(base_url=base_url, api_key=key or "not needed")
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
