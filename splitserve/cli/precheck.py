"""What can be known to be wrong about a deployment's models and engines before any process starts. Reads no weights."""

from __future__ import annotations

from dataclasses import replace

from splitserve.config import EngineConfig
from splitserve.errors import SplitserveError
from splitserve.launch.deployment import Deployment


def check_models(deployment: Deployment) -> None:
    """Raise the ConfigError or WeightsError that an engine would meet: no such model, truncated, unknown, odd TP.

    Other engines than ours read their models themselves, and know more of them.
    """
    for group in deployment.groups:
        if group.program.foreign:
            continue
        try:
            _check_model(group.engine)
        except SplitserveError as e:
            e.message = f"[{group.role}] {e.message}"
            raise


def check_engines(deployment: Deployment) -> list[str]:
    """Warnings about the versions of other engines. ConfigError, with the line that installs it, for a missing one."""
    from splitserve.launch.engines import installed

    programs = dict.fromkeys(g.program for g in deployment.groups if g.program.foreign)
    return [warning for program in programs if (warning := installed.check(program))]


def _check_model(engine: EngineConfig) -> None:
    import psutil

    from splitserve.engine.memory import size
    from splitserve.models import registry
    from splitserve.models.read import read_config
    from splitserve.spec import lay_out, page_tokens
    from splitserve.weights.locate import locate
    from splitserve.weights.open import open_checkpoint

    source = locate(engine.model)
    cfg = read_config(source)
    if not engine.dummy_weights:
        open_checkpoint(source)
    dtype = engine.dtype if engine.dtype != "auto" else "bf16"
    drafts = engine.speculative != "none"
    specs = registry.states(cfg, dtype=dtype, kv=engine.kv_dtype, draft=drafts)
    engine = replace(engine, page_tokens=page_tokens(specs, engine.page_tokens))
    layout = lay_out(specs, page_tokens=engine.page_tokens, rank=engine.tp - 1, size=engine.tp)
    if engine.device == "cpu":
        # The engine asks again, with the memory that is free when its weights are in.
        size(engine, layout, model_max_len=cfg.max_len, free_bytes=psutil.virtual_memory().available)
