"""`splitserve serve` with a fake engine behind it: python tests/proc/serve_fake.py JSON (the arguments of run)."""

import json
import sys
from pathlib import Path

from splitserve.config import EngineConfig, ServerConfig, TransferConfig
from splitserve.errors import ConfigError, SplitserveError
from splitserve.server.main import run

ENGINE = Path(__file__).parent.parent / "fake_engine.py"


def argv(config: Path, alive_fd: int) -> list[str]:
    return [sys.executable, str(ENGINE), "--config", str(config), "--alive-fd", str(alive_fd)]


def main() -> int:
    given = json.loads(sys.argv[1])
    try:
        return run(
            EngineConfig(**given["engine"]),
            TransferConfig(),
            ServerConfig(**given["server"]),
            alive_fd=given["alive_fd"],
            run_dir=given["run_dir"],
            argv=argv,
        )
    except SplitserveError as e:
        print(f"error: {e.message}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
