"""Ranks on one GPU add up and join through its memory, eagerly and in a CUDA graph, as a group over gloo would."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.ranks import free_port

pytestmark = pytest.mark.gpu

RANK = """
import json, sys, torch
from splitserve.dist.group import TorchGroup
from splitserve.dist import peers
rank, size, port = map(int, sys.argv[1:])
device = torch.device("cuda", 0)
group = peers.join(TorchGroup(rank, size, host="127.0.0.1", port=port), device, shared=True)
def part(r, n, dtype):
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * n + r)).to(dtype)
bad = []
for dtype in (torch.bfloat16, torch.float32):
    for n in (8, 4096, 7168 * 3, 3_000_001 if dtype == torch.float32 else 5_000_000):
        x = part(rank, n, dtype).to(device)
        want = part(0, n, dtype)
        for r in range(1, size):
            want = want + part(r, n, dtype)
        y = x.clone()
        if n == 4096:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                z = x.clone(); group.all_reduce(z); torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    y.copy_(x); group.all_reduce(y)
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
        else:
            group.all_reduce(y)
        if not torch.equal(y.cpu(), want):
            bad.append(f"sum {n} {dtype}: {(y.cpu().float() - want.float()).abs().max()}")
        joined = group.all_gather(x.view(-1, 1)[:1000], -1).cpu()
        if not torch.equal(joined, torch.stack([part(r, n, dtype)[:1000] for r in range(size)], -1)):
            bad.append(f"join {n} {dtype}")
from splitserve.ops.triton import v4
def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
fn, base, scale = numbers(1, 24, 4 * 4096).float() / 128, numbers(2, 24).float(), numbers(3, 3).float().abs()
for tokens in (1, 64, 5, 1):
    streams = numbers(4, tokens, 4, 4096)
    leave = v4.hc_enter(streams, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-6)[1]
    for turn in range(4):
        parts = [numbers(10 + r + 100 * turn, tokens, 4096) for r in range(size)]
        got = leave(parts[rank].clone(), group)
        want = leave(sum(p.float() for p in parts).bfloat16(), None)
        off = ((got.float() - want.float()).norm() / want.float().norm()).item()
        if not off < 0.01:
            bad.append(f"{tokens} rows' sum inside the streams' kernel, turn {turn}: off by {off}")
        whole = group.all_gather(got.view(-1)[:1000].float(), -1).view(size, -1)
        if not (whole == whole[0]).all():
            bad.append(f"ranks hold different streams of {tokens}")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    part = numbers(10 + rank, 1, 4096)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        got = leave(part, group)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
want = leave(sum(numbers(10 + r, 1, 4096).float() for r in range(size)).bfloat16(), None)
if not (got.float() - want.float()).norm() < 0.01 * want.float().norm():
    bad.append("the sum inside a replayed kernel")
torch.cuda.synchronize()
group.close()
print(json.dumps({"how": group.how, "bad": bad}))
"""


@pytest.mark.parametrize("size", [2, 4])
def test_sums_and_joins_of_ranks_that_share_a_gpu(size: int):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(r), str(size), port], stdout=subprocess.PIPE, text=True
        )
        for r in range(size)
    ]
    try:
        told = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [t["bad"] for t in told] == [[]] * size
    assert "share" in told[0]["how"]
