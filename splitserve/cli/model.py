"""`fetch`, `make-checkpoint` and `state`: models onto this disk, and what a model keeps for a request."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from splitserve.errors import ConfigError
from splitserve.spec import Growth, Layout, StateSpec, bytes_per_token, lay_out, live_bytes, page_tokens

_LIKE = "deepseek-v4-flash"


def make_checkpoint(args: argparse.Namespace) -> int:
    """Write a random checkpoint in the original format, and a tokenizer of bytes. Same seed, same bytes."""
    from splitserve.models import make_checkpoint as random
    from splitserve.text import byte_tokenizer

    if args.like != _LIKE:
        raise ConfigError(f"--like {args.like!r} is not known", field="like", fix=f"known: {_LIKE}")
    if args.tiny + args.t1 + bool(args.layers) != 1:
        raise ConfigError(
            "give one of --tiny, --t1 and --layers N", fix="see `splitserve make-checkpoint --help`"
        )
    directory = Path(args.directory)
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty", fix="name a new directory")
    config = random.TINY if args.tiny else random.T1 if args.t1 else random.flash(args.layers)
    config = random.changed(config, args.set)
    byte_tokenizer.check(config["vocab_size"])
    if args.config_only:
        num_bytes = 0
        random.write_config(directory, config, fp8_experts=args.fp8_experts)
    else:
        num_bytes = random.write_checkpoint(
            directory, config, seed=args.seed, fp8_experts=args.fp8_experts, progress=_show
        )
    byte_tokenizer.write(directory, num_tokens=config["vocab_size"])
    done = {"directory": str(directory), "bytes": num_bytes, "seed": args.seed}
    print(json.dumps(done) if args.json else f"{directory}: {num_bytes:,} bytes")
    return 0


def fetch(args: argparse.Namespace) -> int:
    """Download a checkpoint. Called again it goes on where it stopped."""
    from splitserve.weights import fetch as hub
    from splitserve.weights.locate import DEMO_MODEL, locate

    if args.model.lower() == DEMO_MODEL:
        print(f"{locate(DEMO_MODEL).path}: comes with its package")
        return 0
    directory = Path(args.dir or args.model.rpartition("/")[2])
    done = hub.fetch(
        args.model, directory, revision=args.revision, tell=lambda line: print(line, file=sys.stderr)
    )
    answer = {
        "directory": str(done.directory),
        "repository": done.repository,
        "revision": done.revision,
        "files": done.num_files,
        "bytes": done.num_bytes,
    }
    commit = done.revision[:12]
    text = (
        f"{done.directory}: {done.num_files} files, {done.num_bytes:,} bytes, {done.repository} at {commit}"
    )
    print(json.dumps(answer) if args.json else text)
    return 0


def state(args: argparse.Namespace) -> int:
    """Bytes that a request holds and a handoff moves, by prompt length, and the least that the model needs.

    As an engine keeps them on this machine, where the words say nothing else.
    """
    from splitserve.launch import topology
    from splitserve.models import registry
    from splitserve.models.read import read_config
    from splitserve.weights.locate import locate

    cfg = read_config(locate(args.model))
    device = args.device or ("cuda" if topology.read().gpus else "cpu")
    dtype = registry.encoding(cfg, args.dtype, device=device)
    specs = registry.states(cfg, dtype=dtype, kv=args.kv_dtype)
    least = registry.family(cfg).least
    kv = {} if args.kv_dtype == "auto" else {"kv": args.kv_dtype}
    layout = lay_out(specs, page_tokens=page_tokens(specs, args.page_tokens))
    rows = [_row(specs, length, layout) for length in args.lengths]
    for row in rows:
        row["least"] = least(cfg, row["tokens"], dtype=dtype, **kv) if least else row["moved"]
    if args.json:
        kept = {
            "device": device,
            "dtype": dtype,
            "kv_dtype": args.kv_dtype,
            "page_tokens": layout.page_tokens,
        }
        print(json.dumps({**kept, "bytes_per_token": bytes_per_token(specs), "prompts": rows}))
        return 0
    _print_state(rows, specs, layout, how=_how(args, device, dtype))
    return 0


def _how(args: argparse.Namespace, device: str, dtype: str) -> str:
    where = "a GPU" if device == "cuda" else "this CPU"
    packed = " with packed rows" if args.kv_dtype == "fp8" else ""
    chosen = f"as an engine on {where} keeps it by default" if args.dtype == "auto" else "as asked for"
    return f"{dtype}{packed}, {chosen}"


def _print_state(rows: list[dict[str, Any]], specs: list[StateSpec], layout: Layout, *, how: str) -> None:
    print(f"state in {how}\n")
    print(f"{bytes_per_token(specs):,.2f} bytes for each further token, on each rank that holds all of it\n")
    print(
        f"a page of {layout.page_tokens} tokens: {layout.page_bytes:,} bytes; a slot: {layout.slot_bytes:,}\n"
    )
    names = ("in pages", "in the slot", "moved", "least")
    print(f"{'tokens':>10}", *(f"{name:>15}" for name in names), f"{'moved/least':>12}  {'held':>15}")
    for row in rows:
        shown = (row["pages"], row["slot"], row["moved"], row["least"])
        ratio = row["moved"] / row["least"]
        print(f"{row['tokens']:>10,}", *(f"{n:>15,}" for n in shown), f"{ratio:>12.3f}  {row['held']:>15,}")


def _row(specs: list[StateSpec], length: int, layout: Layout) -> dict[str, Any]:
    """`moved` by a handoff, and `held` by the request: whole pages and a whole slot."""
    pages = live_bytes([s for s in specs if s.growth is Growth.PAGED], 0, length)
    moved = live_bytes(specs, 0, length)
    held = -(-length // layout.page_tokens) * layout.page_bytes + layout.slot_bytes
    return {"tokens": length, "moved": moved, "pages": pages, "slot": moved - pages, "held": held}


def _show(done: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:4.0%}", end="\n" if done >= 1 else "", file=sys.stderr, flush=True)
