"""A deployment as a systemd unit: `splitserve render systemd FILE`. Pure text: it asks no systemd and installs nothing.

The unit runs `splitserve up FILE` in the foreground and leaves to that supervisor all that it does anyway: starting
order, readiness, restarts of single processes, drain. systemd starts the supervisor with the host, and again if it
fails as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from splitserve.errors import ConfigError
from splitserve.launch.deployment import Deployment

_UNIT = """\
# Written by `splitserve render systemd`, for /etc/systemd/system/splitserve-{name}.service. Then:
#   systemctl daemon-reload && systemctl enable --now splitserve-{name}
[Unit]
Description=splitserve {name}
Wants=network-online.target
After=network-online.target nvidia-persistenced.service

[Service]
# `up` stays in the foreground and tells systemd nothing: `splitserve status --wait 600` waits for it to be ready.
Type=exec
{user}WorkingDirectory={directory}
ExecStart={command}
# SIGTERM goes to the supervisor alone, which drains; what is left after TimeoutStopSec is killed, all of it.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
Restart=on-failure
RestartSec=5
# 2: wrong settings, which another start would not mend.
RestartPreventExitStatus=2
# An engine that the kernel killed for memory is started again by the supervisor, not the whole unit stopped.
OOMPolicy=continue
# Connections of clients and between engines; memory that UCX registers with devices; threads of every rank.
LimitNOFILE=1048576
LimitMEMLOCK=infinity
TasksMax=infinity

[Install]
WantedBy=multi-user.target
"""


def render(
    deployment: Deployment,
    *,
    python: str,
    file: str,
    directory: str,
    sets: Sequence[str] = (),
    user: str = "",
) -> str:
    """The unit's text. `python` and `file` are absolute paths, `directory` is where relative paths in the file begin.

    `sets` are --set words for `up`; `user` is whom the service runs as ("": root). ConfigError for a path or name that
    no unit can hold.
    """
    for text in (python, file, directory, user, *sets):
        if not text.isprintable():
            raise ConfigError(f"{text!r} has characters that no unit can hold", field="file")
    words = [python, "-m", "splitserve", "up", file]
    words += [word for each in sets for word in ("--set", each)]
    config = deployment.config
    return _UNIT.format(
        name=deployment.name,
        user=f"User={_literal(user)}\n" if user else "",
        directory=_literal(directory),
        command=" ".join(map(_word, words)),
        stop_s=int(config.drain_s + 2 * config.kill_after_s) + 5,  # the supervisor's own limit, and a little
    )


def _literal(text: str) -> str:
    """% begins a specifier in every setting."""
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """One word of a command line; $ begins a variable there, and quoting is C's, which JSON's is a part of."""
    word = _literal(text).replace("$", "$$")
    bare = word and all(c.isalnum() or c in "%$/._-=:,+@" for c in word)
    return word if bare else json.dumps(word, ensure_ascii=False)
