"""Architecture -> what it keeps and which class runs it. Torch-free: a class is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from splitserve.errors import ConfigError, WeightsError
from splitserve.spec import StateSpec

from .config import ModelConfig
from .deepseek_v4_states import deepseek_v4_states, least_bytes
from .shares import check_decoder, check_deepseek_v4
from .states import decoder_states

if TYPE_CHECKING:
    from splitserve.layers.forward import Forward
    from splitserve.weights.locate import Source


class Model(Protocol):
    """A model on one rank. Made by `build`; `load` once, then `forward` once a step."""

    def load(self, source: Source, progress: Callable[[float], None] | None = None) -> None: ...

    def forward(self, fwd: Forward) -> Any:
        """Logits [num_logits, vocab] float32, the same on every rank of the group."""
        ...


@dataclass(frozen=True)
class Family:
    states: Callable[..., list[StateSpec]]  # (cfg, *, dtype)
    module: str
    name: str  # class in the module: (cfg, tp, dtype, device)
    deal: Callable[..., None]  # (cfg, size): ConfigError where it cannot be dealt out to so many ranks
    packs: bool = False  # its states can be packed: `states` takes kv="fp8"
    dummies: bool = False  # it can make its weights up: `load_dummy`
    least: Callable[..., int] | None = (
        None  # (cfg, length, *, dtype, kv) -> bytes; None: its states are the least
    )
    drafts: bool = False  # it can guess tokens ahead: `states` and the class take draft=True


_DECODER = Family(decoder_states, "splitserve.models.llama", "Llama", check_decoder, dummies=True)
_DEEPSEEK_V4 = Family(
    deepseek_v4_states,
    "splitserve.models.deepseek_v4",
    "DeepseekV4",
    check_deepseek_v4,
    packs=True,
    dummies=True,
    least=least_bytes,
    drafts=True,
)

FAMILIES: dict[str, Family] = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"), _DECODER)
FAMILIES["deepseek_v4"] = _DEEPSEEK_V4


def family(cfg: ModelConfig) -> Family:
    if cfg.arch not in FAMILIES:
        raise WeightsError(
            f"architecture {cfg.arch!r} is not known", fix=f"known: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[cfg.arch]


def check_tp(cfg: ModelConfig, size: int) -> None:
    """ConfigError where the model's heads or experts cannot be dealt out to `size` ranks."""
    family(cfg).deal(cfg, size)


def encoding(cfg: ModelConfig, wanted: str = "auto", *, device: str) -> str:
    """How weights and state are kept on "cpu" or "cuda": as wanted, else as the checkpoint has them on a GPU.

    On a CPU "auto" is what is fast on this one.
    """
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return cfg.encoding if cfg.encoding in ("bf16", "f16") else "bf16"
    return "bf16" if _cpu_has_bf16() else "f32"


def _cpu_has_bf16() -> bool:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def states(cfg: ModelConfig, *, dtype: str, kv: str = "auto", draft: bool = False) -> list[StateSpec]:
    """What the model keeps, with numbers encoded as `dtype` (f32, bf16 or f16), or packed where `kv` is "fp8".

    `draft` adds what guessing tokens ahead needs. Raises ConfigError where the model cannot pack or guess.
    """
    chosen = family(cfg)
    more: dict[str, Any] = _drafting(cfg, draft)
    if kv != "auto" and not chosen.packs:
        raise ConfigError(
            f"kv_dtype={kv!r}: {cfg.arch} has no packed rows", field="kv_dtype", fix="leave kv_dtype at auto"
        )
    if kv != "auto":
        more["kv"] = kv
    return chosen.states(cfg, dtype=dtype, **more)


def build(cfg: ModelConfig, tp: Any, *, dtype: str, device: str = "cpu", draft: bool = False) -> Model:
    """An empty model for one rank of the group `tp`. Imports torch.

    `draft` loads the part that guesses tokens ahead too. Raises ConfigError where tp does not fit, or there is none.
    """
    chosen = family(cfg)
    more = _drafting(cfg, draft)
    model: Model = getattr(importlib.import_module(chosen.module), chosen.name)(
        cfg, tp, dtype, device, **more
    )
    return model


def _drafting(cfg: ModelConfig, draft: bool) -> dict[str, Any]:
    if not draft:
        return {}
    if not family(cfg).drafts:
        raise ConfigError(
            f"speculative: {cfg.arch} has no layer that guesses tokens ahead",
            field="speculative",
            fix="leave speculative at none",
        )
    return {"draft": True}


def load(
    model: Any, cfg: ModelConfig, source: Source, *, dummy: bool, progress: Callable[[float], None]
) -> None:
    """Read the checkpoint's weights, or make random ones up (`dummy`). Raises WeightsError, ConfigError."""
    if not dummy:
        model.load(source, progress)
        return
    if not family(cfg).dummies:
        raise ConfigError(f"dummy_weights: {cfg.arch} cannot make its weights up", field="dummy_weights")
    model.load_dummy(progress=progress)
