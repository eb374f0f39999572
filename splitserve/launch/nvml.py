"""GPUs as NVML tells them: names, memory, NVLink, and whether two may reach each other. Reads; decides nothing.

NVML comes with the driver; nvidia-ml-py only speaks to it. Where either is missing there are no GPUs here, and
`GpuReading.trouble` says which. Every question beyond a GPU's name is optional: older drivers and virtual GPUs refuse
some, and a refusal is "unknown", never an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.launch.pci import number

_P2P_WRITE = 1  # NVML_P2P_CAPS_INDEX_WRITE
_P2P_STATES = {
    0: "ok",
    1: "the chipset does not allow it",
    2: "this GPU does not support it",
    3: "they meet at an IO hub that does not pass it on",
    4: "a registry key disables it",
    5: "the driver does not support it for this GPU",
}
"""nvmlGpuP2PStatus_t. GeForce cards answer 5 or 2 with NVIDIA's own driver."""

_REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_MOST_LINKS = 18


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML names it. `node` is -1 where the platform does not say."""

    index: int
    name: str
    uuid: str
    memory: int
    free: int
    bus: str
    node: int
    arch: int = 0  # 90 for sm_90; 0 where it is not known

    @property
    def address(self) -> str:
        """As sysfs writes it: a domain of 4 digits, where NVML has 8."""
        return self.bus[-12:]


@dataclass(frozen=True)
class GpuPair:
    """Two GPUs, a < b. `p2p` is "ok", why not, or "unknown"; `nvlinks` counts links between them or to one NVSwitch."""

    a: int
    b: int
    p2p: str
    nvlinks: int = 0


@dataclass(frozen=True)
class GpuReading:
    """`driver` and `cuda` (the newest that it runs, "13.0") are "" without one; `trouble` is why there are no GPUs."""

    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    driver: str = ""
    cuda: str = ""
    trouble: str = ""


def read_gpus(base: Path, library: Any = None) -> GpuReading:
    """All GPUs; `library` stands in for pynvml."""
    if library is None:
        try:
            import pynvml
        except ImportError:
            return GpuReading(trouble="nvidia-ml-py is not installed")
        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError as e:
        return GpuReading(trouble=f"NVML does not start: {e}")
    try:
        handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        return GpuReading(
            gpus=tuple(_gpu(library, base, i, handle) for i, handle in enumerate(handles)),
            pairs=_pairs(library, handles),
            driver=_plain(_ask(library, "nvmlSystemGetDriverVersion", otherwise="")),
            cuda=_version(_ask(library, "nvmlSystemGetCudaDriverVersion_v2", otherwise=0)),
        )
    finally:
        library.nvmlShutdown()


def _gpu(nvml: Any, base: Path, index: int, device: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    bus = _plain(nvml.nvmlDeviceGetPciInfo(device).busId).lower()
    node = number(base / f"sys/bus/pci/devices/{bus[-12:]}/numa_node", -1)
    name, uuid = _plain(nvml.nvmlDeviceGetName(device)), _plain(nvml.nvmlDeviceGetUUID(device))
    major, minor = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", device, otherwise=(0, 0))
    return Gpu(index, name, uuid, memory.total, memory.free, bus, node, 10 * major + minor)


def _pairs(nvml: Any, handles: list[Any]) -> tuple[GpuPair, ...]:
    buses = [_plain(nvml.nvmlDeviceGetPciInfo(h).busId).lower() for h in handles]
    links = [_links(nvml, handle) for handle in handles]
    found = []
    for a, one in enumerate(handles):
        for b, other in enumerate(handles[a + 1 :], a + 1):
            state = _ask(nvml, "nvmlDeviceGetP2PStatus", one, other, _P2P_WRITE)
            direct = links[a].get(buses[b], 0)
            switched = min(links[a].get("switch", 0), links[b].get("switch", 0))
            found.append(GpuPair(a, b, _P2P_STATES.get(state, "unknown"), direct or switched))
    return tuple(found)


def _links(nvml: Any, device: Any) -> dict[str, int]:
    """Active NVLinks by the bus id at their other end; all those to NVSwitches as "switch"."""
    found: dict[str, int] = {}
    for link in range(_MOST_LINKS):
        if not _ask(nvml, "nvmlDeviceGetNvLinkState", device, link):
            continue
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", device, link)
        remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", device, link)
        end = "switch" if kind == _REMOTE_SWITCH else _plain(remote.busId).lower() if remote else ""
        found[end] = found.get(end, 0) + 1
    return found


def _ask(nvml: Any, question: str, *words: Any, otherwise: Any = None) -> Any:
    """The answer, or `otherwise` where this GPU refuses or this version of nvidia-ml-py does not know the question."""
    try:
        return getattr(nvml, question)(*words)
    except (nvml.NVMLError, AttributeError):
        return otherwise


def _version(number_of_cuda: int) -> str:
    """13000 is "13.0", 12080 "12.8"."""
    return f"{number_of_cuda // 1000}.{number_of_cuda % 1000 // 10}" if number_of_cuda else ""


def _plain(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
