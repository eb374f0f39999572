"""What can be known to be wrong about a deployment's models and engines before any process starts. Reads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from splitserve.config import EngineConfig
from splitserve.errors import ConfigError, SplitserveError
from splitserve.launch.deployment import Group
from splitserve.launch.fits import Footprint


def check_models(groups: Sequence[Group], *, free: int) -> dict[str, Footprint]:
    """What an engine of each role needs at least; `free` bytes are there for those on the host.

    Raises the ConfigError or WeightsError that an engine would meet: no such model, truncated, unknown, odd TP.
    """
    found = {str(group.role): check_model(group, free=free) for group in groups}
    return {role: footprint for role, footprint in found.items() if footprint is not None}


def check_model(group: Group, *, free: int) -> Footprint | None:
    """The same for one role; None for other engines than ours, which read their models themselves and know more.

    Of those only a path that leads nowhere is refused: they would take it for a name on a hub, and say so late.
    """
    if group.program.foreign:
        _check_path(group)
        return None
    try:
        return _check_model(group.engine, free)
    except SplitserveError as e:
        e.message = f"[{group.role}] {e.message}"
        raise


def _check_path(group: Group) -> None:
    model = group.engine.model
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise ConfigError(
            f"[{group.role}] no model at {model}",
            field="model",
            fix=f"a directory or file that exists on this host, or a name that {group.program.name} can fetch",
        )


def check_engines(groups: Sequence[Group]) -> list[str]:
    """Warnings about the versions of other engines. ConfigError, with the line that installs it, for a missing one."""
    from splitserve.launch.engines import installed

    programs = dict.fromkeys(g.program for g in groups if g.program.foreign)
    return [warning for program in programs if (warning := installed.check(program))]


def _check_model(engine: EngineConfig, free: int) -> Footprint:
    from splitserve.engine.memory import size
    from splitserve.models import registry
    from splitserve.models.read import read_config
    from splitserve.spec import lay_out, page_tokens
    from splitserve.weights.locate import locate
    from splitserve.weights.open import open_checkpoint

    source = locate(engine.model)
    cfg = read_config(source)
    weights = 0
    if not engine.dummy_weights:
        checkpoint = open_checkpoint(source)
        weights = sum(checkpoint.span(name).nbytes for name in checkpoint.names())
    registry.check_tp(cfg, engine.tp)
    dtype = registry.encoding(cfg, engine.dtype, device=engine.device)
    drafts = engine.speculative != "none"
    specs = registry.states(cfg, dtype=dtype, kv=engine.kv_dtype, draft=drafts)
    engine = replace(engine, page_tokens=page_tokens(specs, engine.page_tokens))
    layout = lay_out(specs, page_tokens=engine.page_tokens, rank=engine.tp - 1, size=engine.tp)
    if engine.device == "cpu":
        # The engine asks again, with the memory that is free when its weights are in.
        size(engine, layout, model_max_len=cfg.max_len, free_bytes=free)
    return Footprint(weights, _least_state(engine, layout.page_bytes, layout.slot_bytes))


def _least_state(engine: EngineConfig, page_bytes: int, slot_bytes: int) -> int:
    """Of one rank: what the file names, else one page and the slots."""
    if engine.memory_mb:
        return engine.memory_mb * 10**6
    return max(1, engine.num_pages) * page_bytes + engine.max_seqs * slot_bytes
