"""What DeepSeek-V4 keeps for a token or a request. Torch-free.

    name           layers    growth        a row is
    window         all       RING W        one token's latent: key and value at once, after norm and rope
    c4             ratio 4   PAGED 1/4     a compressed latent, final at the token that closes its four
    index          ratio 4   PAGED 1/4     the indexer's key of the same four tokens
    c128           ratio 128 PAGED 1/128   a compressed latent of 128 tokens
    c4_carry       ratio 4   RING 8        half A of a token's compressor input, [kv | score], for the next four
    c4_pending     ratio 4   TAIL 4        half B, for its own four
    index_carry    ratio 4   RING 8        the same for the indexer's keys
    index_pending  ratio 4   TAIL 4
    c128_pending   ratio 128 TAIL 128      [kv | score]

Compressor input is float32, and its scores have their position's bias added already. At a multiple of 128 tokens only
the window and the carries are alive beside the pages. A carry holds eight rows, not four, because the four tokens of
the last complete window stay needed while the next four arrive; the same slack lets one drafted token be taken back.

The latent is one piece: every TP rank holds all of it.
"""

from __future__ import annotations

from splitserve.errors import ConfigError
from splitserve.spec import Growth, StateSpec

from .deepseek_v4_config import CSA, HCA, DeepseekV4Config
from .states import BYTES

PACKED_LATENT = "fp8_ds_mla"
"""Row encoding: E4M3 numbers, then the rotary part in bf16, then one ue8m0 scale for 64 numbers, padded to 8 bytes."""
PACKED_INDEX = "fp8_scaled"
"""Row encoding: E4M3 numbers, then one float32 scale."""

SCALE_GROUP = 64


def latent_bytes(nope_dim: int, rope_dim: int) -> int:
    """Bytes of a packed latent: 448 + 2 * 64 + 8 = 584 for the released models."""
    scales = -(-nope_dim // SCALE_GROUP)
    return nope_dim + 2 * rope_dim + -(-scales // 8) * 8


def deepseek_v4_states(
    cfg: DeepseekV4Config, *, dtype: str, kv: str = "", draft: bool = False
) -> list[StateSpec]:
    """Latents and index keys in `kv` ("fp8" packs them; default: as `dtype`), compressor input in float32.

    `draft` adds the window of the MTP layer, which only drafting uses.
    Raises ConfigError for an encoding that is not one of f32, bf16, f16 and fp8.
    """
    kv = kv or dtype
    if kv != "fp8" and kv not in BYTES:
        raise ConfigError(f"KV encoding {kv!r} is not known", fix=f"one of {', '.join(BYTES)}, fp8")
    specs = []
    for layer in range(cfg.num_layers + (cfg.num_mtp if draft else 0)):
        specs += _layer_states(cfg, layer, kv)
    return specs


def least_bytes(cfg: DeepseekV4Config, length: int, *, dtype: str, kv: str = "") -> int:
    """The least that can be kept of a prompt of `length` tokens for decoding to go on, in the same encodings.

    Counted from the model, not from the states above: windows, entries that are complete, and the compressors' float32
    input of tokens that wait, or are needed once more by the next entry.
    """
    latent, index = _row_bytes(cfg, kv or dtype)
    csa, hca = (sum(r == ratio for r in cfg.ratios[: cfg.num_layers]) for ratio in (CSA, HCA))
    window = cfg.num_layers * min(length, cfg.window_len) * latent
    entries = csa * (length // CSA) * (latent + index) + hca * (length // HCA) * latent
    width = 4 * 2 * (cfg.head_dim + cfg.index_dim)  # [kv | score] of one half
    overlap = CSA * width if length >= CSA else 0
    waiting = csa * (overlap * 2 + length % CSA * 2 * width) + hca * (length % HCA) * 4 * 2 * cfg.head_dim
    return window + entries + waiting


def _row_bytes(cfg: DeepseekV4Config, kv: str) -> tuple[int, int]:
    """Bytes of a latent and of an index key."""
    if kv == "fp8":
        return latent_bytes(cfg.nope_dim, cfg.rope_dim), cfg.index_dim + 4
    return cfg.head_dim * BYTES[kv], cfg.index_dim * BYTES[kv]


def _layer_states(cfg: DeepseekV4Config, layer: int, kv: str) -> list[StateSpec]:
    d, i = cfg.head_dim, cfg.index_dim
    names = (PACKED_LATENT, PACKED_INDEX) if kv == "fp8" else (kv, kv)
    latent, index = zip(_row_bytes(cfg, kv), names, strict=True)
    specs = [StateSpec("window", layer, Growth.RING, latent[0], rows=cfg.window_len, encoding=latent[1])]
    ratio = cfg.ratios[layer]
    if ratio == CSA:
        specs += [
            StateSpec("c4", layer, Growth.PAGED, latent[0], tokens_per_row=CSA, encoding=latent[1]),
            StateSpec("index", layer, Growth.PAGED, index[0], tokens_per_row=CSA, encoding=index[1]),
            StateSpec("c4_carry", layer, Growth.RING, 8 * d, rows=2 * CSA, encoding="f32"),
            StateSpec("c4_pending", layer, Growth.TAIL, 8 * d, rows=CSA, encoding="f32"),
            StateSpec("index_carry", layer, Growth.RING, 8 * i, rows=2 * CSA, encoding="f32"),
            StateSpec("index_pending", layer, Growth.TAIL, 8 * i, rows=CSA, encoding="f32"),
        ]
    if ratio == HCA:
        specs += [
            StateSpec("c128", layer, Growth.PAGED, latent[0], tokens_per_row=HCA, encoding=latent[1]),
            StateSpec("c128_pending", layer, Growth.TAIL, 8 * d, rows=HCA, encoding="f32"),
        ]
    return specs
