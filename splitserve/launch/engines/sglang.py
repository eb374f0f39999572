"""SGLang's server (`sglang.launch_server`) as one half of a pair over its NIXL backend, or alone. Pure.

Prefill runs the bootstrap server at which decode asks for the ranks of a room; our router gives decode its address in
every request, so neither half is told of the other here. `--dist-init-addr` is given always: without it two engines on
one host choose the ports of their ranks by the same rule from their HTTP ports.
"""

from __future__ import annotations

from splitserve.launch.engines.seat import Seat, gpu_settings, ucx_settings
from splitserve.types import Role

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_KV_DTYPES = {"fp8": "fp8_e4m3"}


class Sglang:
    """Implements seat.Adapter."""

    name = "sglang"
    distributions = ("sglang",)
    known_versions = ("0.5.23",)
    install = '{python} -m pip install "sglang==0.5.23" nixl'
    settings = frozenset(
        (
            "dtype",
            "dummy_weights",
            "kv_dtype",
            "max_len",
            "max_seqs",
            "page_tokens",
            "prefix_cache",
            "served_name",
            "step_tokens",
        )
    )

    def ports(self, role: Role) -> tuple[str, ...]:
        return ("bootstrap", "dist") if role is Role.PREFILL else ("dist",)

    def argv(self, seat: Seat) -> tuple[str, ...]:
        words = ["-m", "sglang.launch_server", "--model-path", seat.config.model]
        words += ["--host", seat.server.host, "--port", seat.port("http")]
        words += ["--tp-size", str(seat.config.tp), "--device", seat.config.device]
        words += ["--dist-init-addr", f"{seat.address}:{seat.port('dist')}"]
        words += ["--log-level", seat.server.log_level, "--enable-metrics"]
        if seat.split:
            words += ["--disaggregation-mode", str(seat.role), "--disaggregation-transfer-backend", "nixl"]
        if seat.role is Role.PREFILL:
            words += ["--disaggregation-bootstrap-port", seat.port("bootstrap")]
        if seat.gpus and seat.node is not None:
            # As placed here: its own choice by GPU would be the same where the file names nothing.
            words += ["--numa-node", *[str(seat.node)] * seat.config.tp]
        return (*words, *self._settings(seat), *seat.program.args)

    def env(self, seat: Seat) -> dict[str, str]:
        # Else every question after its health makes it generate a token; our router proves pairs by real ones.
        found = {**gpu_settings(seat), "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if seat.split:
            found |= ucx_settings(seat.transfer)
            found["SGLANG_DISAGGREGATION_NIXL_BACKEND"] = seat.transfer.backend
            found["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = "{}"
        return {**found, **seat.program.environment}

    def _settings(self, seat: Seat) -> list[str]:
        words = seat.chosen("served_name", "--served-model-name")
        words += seat.chosen("max_len", "--context-length")
        words += seat.chosen("max_seqs", "--max-running-requests")
        words += seat.chosen("step_tokens", "--chunked-prefill-size")
        words += seat.chosen("page_tokens", "--page-size")
        words += seat.chosen("dtype", "--dtype", _DTYPES)
        words += seat.chosen("kv_dtype", "--kv-cache-dtype", _KV_DTYPES)
        if not seat.config.prefix_cache:
            words.append("--disable-radix-cache")
        if seat.config.dummy_weights:
            words += ["--load-format", "dummy"]
        return words
