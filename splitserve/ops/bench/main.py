"""`splitserve bench ops`: compile in several processes, measure, print and keep the table."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context

import torch

from splitserve.errors import ConfigError
from splitserve.ops.kernels.archs import kernel_path
from splitserve.ops.kernels.launch import one_by_one

from .run import MODELS, commit, measure, measure_device, save, table
from .words import Plan

ROOM = 10 << 30
"""Bytes of device memory that one process may need: the largest case's inputs."""


def run(plan: Plan) -> int:
    """Exit code 0. The table goes to stdout, and to the files that the plan names. ConfigError without a GPU."""
    if not torch.cuda.is_available():
        fix = "run it where one is (`splitserve topology` shows them), with a torch built for CUDA"
        raise ConfigError("bench ops measures a GPU, and torch sees none here", fix=fix)
    compile_first(plan)
    with one_by_one() if plan.one_by_one else nullcontext():
        return _run(plan)


def _run(plan: Plan) -> int:
    device = measure_device()
    if plan.bandwidth:
        device = replace(device, bandwidth=plan.bandwidth)
    major, minor = torch.cuda.get_device_capability()
    head = [
        f"{device.name}: reads and writes {device.bandwidth:.2f} TB/s, multiplies {device.bf16:.0f} TFLOP/s in bf16 "
        f"and {device.fp8:.0f} in fp8, starts a kernel in {device.floor_us:.2f} us",
        kernel_path([(device.name, 10 * major + minor)]),
    ]
    print("\n".join(head), flush=True)
    rows = measure(plan.models, plan.tokens, device)
    text = table(rows)
    print(text)
    command, revision = "splitserve bench ops " + " ".join(plan.words), plan.commit or commit()
    if plan.json_path:
        save(plan.json_path, rows, device, command, revision)
    if plan.table_path:
        about = [f"commit {revision}, torch {torch.__version__}, {command}"]
        plan.table_path.write_text("\n\n".join([*head, *about]) + "\n" + text + "\n")
    return 0


def compile_first(plan: Plan) -> None:
    """Start every case once, in as many processes as cores and memory allow: compiling takes most of the time."""
    work = [
        (model, count, plan.one_by_one)
        for model in plan.models
        for count in sorted(plan.tokens, reverse=True)
    ]
    room = torch.cuda.mem_get_info()[0] // ROOM
    jobs = max(1, min(plan.jobs or os.cpu_count() or 1, room, len(work)))
    begun = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(_start_each, work))
    print(f"compiled in {time.monotonic() - begun:.0f} s by {jobs} processes", flush=True)


def _start_each(work: tuple[str, int, bool]) -> None:
    model, count, apart = work
    with one_by_one() if apart else nullcontext():
        for case in MODELS[model](count):
            case.calls[0]()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
