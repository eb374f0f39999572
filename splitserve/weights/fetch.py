"""Brings a checkpoint from the Hugging Face Hub into a directory: free disk first, resumable, every file checked.

    names of files and their sizes and checksums ─▶ does it fit? ─▶ each file: download, check, note it in fetched.json

The transport is huggingface_hub, which goes on in the middle of a file that is there in part. It compares sizes only,
so contents are hashed here. What has been checked is not read again while its size and time stay as they were.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.errors import ConfigError, FetchError

KNOWN = {
    "deepseek-v4-flash": "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-v4-flash-base": "deepseek-ai/DeepSeek-V4-Flash-Base",
    "deepseek-v4-pro": "deepseek-ai/DeepSeek-V4-Pro",
}
"""Short names; any OWNER/NAME of the Hub is taken as well."""

WANTED = (".safetensors", ".json", ".jinja", ".model", ".txt", ".gguf")
"""Files of the repository's top that an engine may read; weights in other formats are left out."""

NOTED = "fetched.json"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class File:
    name: str
    size: int  # bytes
    sha256: str  # of large files
    blob: str  # git's sha1 of the others


@dataclass(frozen=True)
class Fetched:
    directory: Path
    repository: str
    revision: str  # the commit
    num_files: int
    num_bytes: int


Tell = Callable[[str], None]


def fetch(
    model: str, directory: Path, *, revision: str = "main", endpoint: str | None = None, tell: Tell
) -> Fetched:
    """Fetch `model` (a short name or OWNER/NAME) into `directory`; call it again to go on where it stopped.

    `tell` gets a line for each file. Raises ConfigError for a model that is not there, FetchError where the disk is
    too small, the network does not answer, or a file comes damaged twice.
    """
    repository = KNOWN.get(model.lower(), model)
    if repository.count("/") != 1:
        raise ConfigError(
            f"{model!r} is no model of the Hub", fix=f"OWNER/NAME, or one of {', '.join(sorted(KNOWN))}"
        )
    with _explained(repository, directory):
        commit, files = _listed(repository, revision, endpoint)
        if not any(f.name.endswith((".safetensors", ".gguf")) for f in files):
            raise ConfigError(f"{repository} has no weights in safetensors or GGUF")
        noted = _Noted(directory, commit)
        missing = [f for f in files if not noted.has(f)]
        _check_disk(directory, missing)
        done = sum(f.size for f in files) - sum(f.size for f in missing)
        for i, file in enumerate(missing):
            _bring(file, repository, commit, directory=directory, endpoint=endpoint)
            noted.add(file)
            done += file.size
            tell(
                f"[{len(files) - len(missing) + i + 1}/{len(files)}] {file.name}: {_gb(file.size)} GB, checked"
            )
    return Fetched(directory, repository, commit, len(files), done)


def _listed(repository: str, revision: str, endpoint: str | None) -> tuple[str, list[File]]:
    """The commit that `revision` means now, and the files wanted of it."""
    found = _hub().HfApi(endpoint=endpoint).model_info(repository, revision=revision, files_metadata=True)
    files = [
        File(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else "", s.blob_id or "")
        for s in found.siblings or ()
        if "/" not in s.rfilename and s.rfilename.endswith(WANTED)
    ]
    return str(found.sha), sorted(
        files, key=lambda f: (f.size, f.name)
    )  # what is wrong shows at the small ones


def _bring(file: File, repository: str, commit: str, *, directory: Path, endpoint: str | None) -> None:
    """Download one file and check it; a damaged one is thrown away and fetched once more."""
    for attempt in range(2):
        path = Path(
            _hub().hf_hub_download(
                repository,
                file.name,
                revision=commit,
                local_dir=directory,
                endpoint=endpoint,
                force_download=attempt > 0,
            )
        )
        if _is_intact(path, file):
            return
        path.unlink()
    raise FetchError(f"{file.name} came damaged twice: its contents are not those that {repository} names")


def _is_intact(path: Path, file: File) -> bool:
    if path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(usedforsecurity=False)
    if not file.sha256:
        digest.update(f"blob {file.size}\0".encode())  # as git names its objects
    with path.open("rb") as f:
        while part := f.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest() == (file.sha256 or file.blob)


class _Noted:
    """Files of one commit that were checked: NOTED in the directory. Written after each file, all or nothing."""

    def __init__(self, directory: Path, commit: str) -> None:
        self._directory = directory
        self._commit = commit
        self._files: dict[str, list[int]] = {}
        try:
            found: dict[str, Any] = json.loads((directory / NOTED).read_text())
            if found["commit"] == commit:
                self._files = dict(found["files"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing was noted: everything is looked at again

    def has(self, file: File) -> bool:
        return file.name in self._files and self._files[file.name] == self._stamp(file.name)

    def add(self, file: File) -> None:
        self._files[file.name] = self._stamp(file.name)
        fresh = self._directory / f"{NOTED}.new"
        fresh.write_text(json.dumps({"commit": self._commit, "files": self._files}))
        fresh.replace(self._directory / NOTED)

    def _stamp(self, name: str) -> list[int]:
        """Size and time of change; nothing for a file that has gone."""
        try:
            stat = (self._directory / name).stat()
        except OSError:
            return []
        return [stat.st_size, stat.st_mtime_ns]


def _check_disk(directory: Path, missing: list[File]) -> None:
    """Refuse before the first byte what could not end. What is there in part counts as there."""
    partial = sum(p.stat().st_size for p in (directory / ".cache").rglob("*.incomplete"))
    needed = sum(f.size for f in missing) - partial
    place = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise FetchError(
            f"{_gb(needed)} GB are still to come and {place} has {_gb(free)} GB free",
            fix="name a directory on a larger disk",
        )


@contextmanager
def _explained(repository: str, directory: Path) -> Iterator[None]:
    """What goes wrong with hub, network and disk, as errors that say what to do."""
    errors = _hub().errors
    try:
        yield
    except errors.GatedRepoError as e:
        raise FetchError(
            f"{repository} asks for an account that has accepted its terms",
            fix="accept them on its page, then set HF_TOKEN to a token of that account",
        ) from e
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as e:
        raise ConfigError(f"the Hub has no {repository} at that revision, or it is private") from e
    except (OSError, errors.HTTPError) as e:
        if isinstance(e, OSError) and e.errno is not None and not _is_network(e):
            raise  # the disk's: no space, no permission
        raise FetchError(
            f"the Hub does not answer: {str(e).splitlines()[0] if str(e) else type(e).__name__}",
            fix=f"call it again to go on. Without a network, on a machine that has one: "
            f"hf download {repository} --local-dir {directory.name} "
            f"--include '*.safetensors' '*.json'; copy the directory here and give it as the model. "
            f"HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror",
        ) from e


def _is_network(e: OSError) -> bool:
    return isinstance(e, ConnectionError | TimeoutError)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f}"


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as e:
        raise ConfigError(
            "fetch needs the package huggingface_hub", fix="pip install 'splitserve[fetch]'"
        ) from e
    return huggingface_hub
