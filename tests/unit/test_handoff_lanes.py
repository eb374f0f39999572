"""Which lane carries a put, read from UCX's log."""

from __future__ import annotations

import pytest

from splitserve.errors import ConfigError
from splitserve.transfer.nixl import _ucx, put_lanes

STAMP = "[1795986065.876298] [vm:7565 :0]   "


def table(where: str, what: str, *rows: str) -> str:
    bar = "+--------+-------------+-----------+"
    lines = [
        bar,
        f"| r0 {where} cfg#1 |",
        f"| {what} |",
        bar,
        "| Range  | Description | Config |",
        bar,
        *rows,
        bar,
    ]
    return "\n".join(STAMP + line for line in lines)


PUT = "remote memory write by ucp_put* from host memory to host"


def test_the_put_table_of_each_kind_of_peer_is_found() -> None:
    text = "\n".join(
        [
            STAMP
            + "ucp_worker.c:1997 UCX  INFO    r0 intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)",
            table("self", PUT, "| 0..inf | zero-copy | self/memory |"),
            table("intra-node", PUT, "| 0..inf | zero-copy | cma/memory |"),
            table("intra-node", "active message by ucp_am_send* from host memory", "| 0 | short | tcp/lo |"),
            table(
                "inter-node",
                PUT,
                "| 0..8184 | short | tcp/eth0 |",
                "| 8185..inf | zero-copy | rc_mlx5/mlx5_0 |",
            ),
        ]
    )
    assert put_lanes(text) == {
        "self": "self/memory",
        "intra-node": "cma/memory",
        "inter-node": "0..8184: tcp/eth0; 8185..inf: rc_mlx5/mlx5_0",
    }


def test_the_last_table_counts_and_other_text_does_not_matter() -> None:
    text = "\n".join(
        [
            table("intra-node", PUT, "| 0..inf | zero-copy | tcp/lo |"),
            "a | line | of | somebody | else",
            table("intra-node", PUT, "| 0..inf | zero-copy | 52% on tcp/lo and 48% on tcp/eth0 |"),
        ]
    )
    assert put_lanes(text) == {"intra-node": "52% on tcp/lo and 48% on tcp/eth0"}
    assert put_lanes(text, memory="cuda") == {}
    on_gpu = text.replace("by ucp_put*", "by ucp_put* from cuda/GPU0 to cuda/dev[1] ").replace(
        "tcp/lo", "cuda_ipc/cuda"
    )
    assert "cuda_ipc/cuda" in put_lanes(text + "\n" + on_gpu, memory="cuda")["intra-node"]
    assert put_lanes("") == {}


def test_ucx_settings_take_their_prefix_once() -> None:
    assert _ucx(("TLS=tcp,self", "UCX_NET_DEVICES=lo")) == {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        _ucx(("TLS",))
