"""transformers' own `generate` on the demo model, in process: one batch of C prompts at a time, greedy.

    python -m benchmarks.serve.peer_transformers DIR [--concurrency 1,4,8] [--repeats 3]

It serves nobody: a batch starts together and ends together, and no HTTP is in it. TTFT is the time of one token. With
--json the last line holds medians for peers.py, and nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.measure import keep, spread
from splitserve.bench.plan import numbers


def seconds(model: PreTrainedModel, prompts: torch.Tensor, num_new: int) -> float:
    begun = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - begun


def medians(result: dict[str, Any]) -> dict[str, Any]:
    """{"1": {"output_tok_s": ...}, ..., "start_s": ...}"""
    return {
        name: {k: s["median"] for k, s in found.items()} if isinstance(found, dict) else found
        for name, found in result.items()
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("directory", type=Path)
    p.add_argument("--concurrency", type=numbers, default=(1, 4, 8))
    p.add_argument("--input-len", type=int, default=256)
    p.add_argument("--output-len", type=int, default=64)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    begun = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.float32).eval()
    prompts = torch.randint(100, 40000, (max(args.concurrency), args.input_len))
    seconds(model, prompts[:1], 1)
    result: dict[str, Any] = {"start_s": time.perf_counter() - begun}
    for count in args.concurrency:
        rates, firsts, per_token = [], [], []
        for _ in range(args.repeats):
            prompts = torch.randint(100, 40000, (count, args.input_len))
            first, whole = seconds(model, prompts, 1), seconds(model, prompts, args.output_len)
            rates.append(count * args.output_len / whole)
            firsts.append(first * 1000)
            per_token.append((whole - first) * 1000 / (args.output_len - 1))
        result[str(count)] = {
            "output_tok_s": spread(rates),
            "ttft_ms": spread(firsts),
            "tpot_ms": spread(per_token),
        }
        print(count, result[str(count)], flush=True)
    print(json.dumps(medians(result)) if args.json else f"kept in {keep('peer_transformers', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
