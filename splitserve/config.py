"""Every setting of every process, in frozen dataclasses: the deployment file, flags and environment share the fields.

`resolve` merges defaults < file < environment (SPLITSERVE_<SECTION>_<FIELD>) < flags once, checks names, types and
ranges, and remembers where each value came from, so that `explain` can say why. This is the only module that reads
environment variables of ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from splitserve.errors import ConfigError
from splitserve.numa import POLICIES

T = TypeVar("T")

ENGINES = ("splitserve", "sglang", "vllm")
"""What can serve behind the router: our own engine, or another that is installed beside it (docs/engines.md)."""


def _f(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    one_of: tuple[str, ...] = (),
) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "one_of": one_of})


@dataclass(frozen=True)
class EngineConfig:
    """One engine: a model on `tp` ranks, its memory and its step."""

    model: str = _f(
        "", "checkpoint directory, .gguf file, or a name that `splitserve fetch` knows (demo: smollm2-135m)"
    )
    served_name: str = _f("", "name in /v1/models; default: from the path")
    role: str = _f("unified", "prefill, decode or unified", one_of=("prefill", "decode", "unified"))
    tp: int = _f(1, "tensor parallel ranks", low=1)
    device: str = _f("cpu", "cpu or cuda", one_of=("cpu", "cuda"))
    dtype: str = _f(
        "auto", "weights and state: auto, f32, bf16 or f16", one_of=("auto", "f32", "bf16", "f16")
    )
    kv_dtype: str = _f(
        "auto",
        "how state rows are kept: auto (as dtype), or fp8 (DeepSeek-V4's packed rows); equal on both sides of a split",
        one_of=("auto", "fp8"),
    )
    dummy_weights: bool = _f(
        False,
        "random weights instead of the checkpoint's, to measure speed: config.json and a tokenizer are enough",
    )
    max_len: int = _f(0, "longest prompt + output; 0: what the model and the memory allow", low=0)
    max_seqs: int = _f(64, "most requests running at once", low=1)
    step_tokens: int = _f(256, "most tokens a step computes (chunk budget)", low=1)
    page_tokens: int = _f(0, "tokens in a page; 0: what suits the model (64; DeepSeek-V4: 256)", low=0)
    memory_mb: int = _f(0, "state memory of one rank; 0: a share of what is free", low=0)
    num_pages: int = _f(0, "pages of one rank; 0: from memory_mb", low=0)
    prefix_cache: bool = _f(True, "reuse the state of equal prompt beginnings")
    num_snapshots: int = _f(
        0,
        "prompt beginnings whose window state is kept for reuse, where the model has any; 0: what a tenth of the memory"
        " holds, at most max_seqs",
        low=0,
    )
    speculative: str = _f(
        "none",
        "mtp: the model's own next-token layer guesses a token ahead; equal on both sides of a split",
        one_of=("none", "mtp"),
    )
    plan_ahead: bool = _f(
        False, "launch a step before the last one's tokens are read: for devices that compute beside the CPU"
    )
    recompute_share: float = _f(
        0.25, "most of a step's tokens that may make up for failed transfers", low=0, high=1
    )
    threads: int = _f(0, "compute threads of a rank; 0: one for each of its cpus", low=0)
    cpus: tuple[int, ...] = _f((), "cpus of the ranks; empty: those this process may use")
    gpus: tuple[int, ...] = _f(
        (), "GPUs of the ranks, as `splitserve topology` numbers them; empty: chosen by place"
    )
    sums: str = _f(
        "auto",
        "how ranks on GPUs add up: auto (through each other's memory where that is faster), or nccl",
        one_of=("auto", "nccl"),
    )
    node: int = _f(-1, "NUMA node whose cpus, memory and GPUs to take; -1: chosen by place", low=-1)
    memory_bind: str = _f(
        "auto",
        "memory of the ranks from their node: bind (only), prefer, interleave (all nodes), none; auto: bind where there"
        " are several nodes and the cpus lie on one",
        one_of=POLICIES,
    )
    allow_faults: bool = _f(False, "let `verify --plant` damage transfers on purpose")


@dataclass(frozen=True)
class TransferConfig:
    """How state moves between engines."""

    transport: str = _f("nixl", "nixl, or local (shared memory, one host)", one_of=("nixl", "local"))
    backend: str = _f("UCX", "NIXL backend plugin")
    direction: str = _f(
        "put",
        "put: prefill writes; get: decode reads, which some boards do better. `up` takes what `doctor --fabric` chose,"
        " unless this is given; equal on both sides of a split",
        one_of=("put", "get"),
    )
    ucx: tuple[str, ...] = _f((), "UCX settings as NAME=VALUE, for example TLS=tcp,self")
    progress_thread: bool = _f(False, "let NIXL poll on a thread of its own; needs a core set aside")
    bootstrap_host: str = _f("127.0.0.1", "address that a prefill engine's rendezvous binds")
    bootstrap_port: int = _f(0, "rendezvous port of a prefill engine; 0: any free one")
    peer_port: int = _f(
        0, "rendezvous port that decode takes for a null bootstrap_port; 0: refuse such requests"
    )
    allow_hosts: tuple[str, ...] = _f(
        ("127.0.0.1", "localhost", "::1"), "rendezvous hosts a request may name"
    )
    hold_lease_s: float = _f(30.0, "how long prefill holds computed state for an offer", low=0.01)
    deadline_s: float = _f(60.0, "most time from a request's arrival to its admission at decode", low=0.01)
    silence_s: float = _f(5.0, "a peer silent this long with our rows at stake is fenced", low=0.01)
    probed: tuple[str, ...] = _f(
        (),
        "what `doctor --fabric` measured, as RANK-PEER/BYTES=GB_PER_S/...: prefill warns of writes that take four times"
        " as long",
    )
    digest_rate: float = _f(0.05, "share of handoffs whose digests are compared in service", low=0, high=1)
    digest_warmup: int = _f(8, "first handoffs of each peer that are always compared", low=0)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP front of an engine."""

    host: str = _f("127.0.0.1", "address to bind; anything but loopback must be asked for")
    port: int = _f(0, "port; 0: any free one", low=0, high=65535)
    api_key_file: str = _f("", "file with one API key a line; empty: no key needed")
    max_body_mb: float = _f(8.0, "largest request body", low=0.001)
    max_requests: int = _f(1024, "most requests at once", low=1)
    request_deadline_s: float = _f(600.0, "most time for one request", low=0.1)
    slow_request_s: float = _f(30.0, "what takes longer is logged at info, as what breaks off is", low=0)
    log_level: str = _f("info", "debug, info, warning or error", one_of=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class RouterConfig:
    """The door: one address in front of prefill and decode engines."""

    host: str = _f("127.0.0.1", "address to bind")
    port: int = _f(8000, "port; 0: any free one", low=0, high=65535)
    policy: str = _f(
        "round_robin",
        "how to choose",
        one_of=("round_robin", "random", "least_loaded", "power_of_two", "cache_aware"),
    )
    api_key_file: str = _f("", "file with one API key a line; empty: no key needed")
    max_body_mb: float = _f(8.0, "largest request body", low=0.001)
    max_requests: int = _f(1024, "most requests at once", low=1)
    request_deadline_s: float = _f(600.0, "most time for one request, over all stages", low=0.1)
    slow_request_s: float = _f(30.0, "what takes longer is logged at info, as what breaks off is", low=0)
    head_timeout_s: float = _f(10.0, "most time for a request's head and body to arrive", low=0.1)
    idle_timeout_s: float = _f(75.0, "a kept-alive connection may idle this long", low=0.1)
    health_interval_s: float = _f(1.0, "time between health checks", low=0.05)
    retries: int = _f(2, "more tries of a request before its first body byte", low=0)
    resume_wait_s: float = _f(
        0.7, "a stream that broke waits so long for an engine that can continue it", low=0
    )
    drain_s: float = _f(
        10.0, "most time a stop waits for running requests; in a deployment, [deployment] says it", low=0
    )
    alone: bool = _f(
        True,
        "while all prefill or all decode engines are down, those of the other half compute requests whole",
    )
    prefill_grace_s: float = _f(
        0.9, "when prefill's connection breaks, decode may still answer within this time", low=0
    )
    engine: str = _f(
        "splitserve",
        "what answers behind it, and so the protocol it is asked by (docs/engines.md)",
        one_of=ENGINES,
    )
    max_queued_tokens: int = _f(
        262144, "prompt tokens waiting at an engine above which it gets no more", low=1
    )
    circuit_failures: int = _f(5, "failures in a row that open an engine's circuit", low=1)
    circuit_open_s: float = _f(5.0, "an open circuit is tried again after this time", low=0.01)
    route_header: bool = _f(False, "tell the route in response header x-splitserve-route")
    log_level: str = _f("info", "debug, info, warning or error", one_of=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class ProgramConfig(EngineConfig):
    """[engine] of a deployment file: the engine's settings, and the program that is to serve with them."""

    engine: str = _f("splitserve", "what serves; default: as [deployment] says", one_of=ENGINES)
    python: str = _f("", "interpreter that has SGLang or vLLM installed; default: the one that runs this")
    args: tuple[str, ...] = _f(
        (), "words put last on SGLang's or vLLM's command line: its flags win over ours"
    )
    env: tuple[str, ...] = _f((), "NAME=VALUE for SGLang's or vLLM's environment, over what we set there")


@dataclass(frozen=True)
class GroupConfig(ProgramConfig):
    """[prefill], [decode] or [unified] of a deployment file: as [engine], and how many such engines."""

    replicas: int = _f(1, "engines of this kind", low=1, high=64)

    def settings(self) -> EngineConfig:
        """The settings of one of these engines, whatever program serves it."""
        return EngineConfig(**{f.name: getattr(self, f.name) for f in fields(EngineConfig)})


@dataclass(frozen=True)
class HostsConfig:
    """[hosts]: where the engines of one deployment file may run."""

    backend: str = _f("local", "local: this host; ray: the hosts of a Ray cluster", one_of=("local", "ray"))
    address: str = _f("auto", "of the Ray cluster, HOST:PORT; auto: the one that this host belongs to")
    wait_s: float = _f(60.0, "most time for the cluster to have room for the engines", low=0.1)


@dataclass(frozen=True)
class DeploymentConfig:
    """[deployment]: what the supervisor does with the processes of one deployment file."""

    name: str = _f("", "name for `down`, `status` and `logs`; default: the file's name")
    engine: str = _f("splitserve", "what serves, unless [engine] or a role says otherwise", one_of=ENGINES)
    model: str = _f("", "the model of every engine, unless [engine] or a role says otherwise")
    restart: bool = _f(True, "start a process again when it dies after the deployment was ready")
    max_restarts: int = _f(
        5, "most restarts of one process in `restart_window_s`; then it is given up", low=0
    )
    restart_window_s: float = _f(120.0, "restarts older than this are forgotten", low=1)
    ready_timeout_s: float = _f(300.0, "most time from start to the first token through every pair", low=0.1)
    drain_s: float = _f(10.0, "most time a stop waits for running requests", low=0)
    kill_after_s: float = _f(
        5.0, "a process that ignores SIGTERM this long after draining is killed", low=0.1
    )
    log_mb: float = _f(16.0, "size at which a log file is cut; one older part is kept", low=0.001)


SECTIONS: dict[str, type] = {
    "deployment": DeploymentConfig,
    "engine": ProgramConfig,
    "prefill": GroupConfig,
    "decode": GroupConfig,
    "unified": GroupConfig,
    "transfer": TransferConfig,
    "server": ServerConfig,
    "router": RouterConfig,
    "hosts": HostsConfig,
}
"""Every section of a deployment file, which are those of environment variables too."""


@dataclass(frozen=True)
class Setting:
    """One resolved value and the place that set it."""

    name: str
    value: Any
    source: str  # "default", "file deploy/demo.toml", "environment SPLITSERVE_ENGINE_TP", "flag --tp"


def resolve(
    cls: type[T],
    section: str,
    *layers: tuple[str, Mapping[str, Any]],
    environ: Mapping[str, str] | None = None,
) -> tuple[T, list[Setting]]:
    """Merge `layers` ((source, values), weakest first) over the defaults of `cls`; environment, then flags, come last.

    Returns the config and every setting with its source. Raises ConfigError that names a misspelt key (with the
    likely right one), a wrong type or a value out of range.
    """
    names = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    env = _environment_layer(section, names, os.environ if environ is None else environ)
    flags = [layer for layer in layers if layer[0].startswith("flag")]
    others = [layer for layer in layers if not layer[0].startswith("flag")]
    values: dict[str, Any] = {}
    source = dict.fromkeys(names, "default")
    for where, given in [*others, *env, *flags]:
        for key, raw in given.items():
            if key not in names:
                raise _unknown_key(key, section, where, names)
            values[key] = _checked(raw, hints[key], names[key], f"[{section}] {key}", where)
            source[key] = f"{where} {env_name(section, key)}" if where == "environment" else where
    config = cls(**values)
    return config, [Setting(f"{section}.{n}", getattr(config, n), source[n]) for n in names]


def env_name(section: str, key: str) -> str:
    return f"SPLITSERVE_{section}_{key}".upper().replace(".", "_")


def unknown_variables(environ: Mapping[str, str], sections: Collection[str] = tuple(SECTIONS)) -> list[str]:
    """Variables that name one of `sections` and no setting of it, each with the likely right one."""
    known = {s: [env_name(s, f.name) for f in fields(SECTIONS[s])] for s in sections if s in SECTIONS}
    told = []
    for name in sorted(environ):
        section = next((s for s in known if name.startswith(env_name(s, ""))), None)
        if section is None or name in known[section]:
            continue
        near = difflib.get_close_matches(name, known[section], n=1)
        told.append(f"{name} is no setting" + (f": did you mean {near[0]}?" if near else ""))
    return told


def check_environment(environ: Mapping[str, str], sections: Collection[str] = tuple(SECTIONS)) -> None:
    """ConfigError for a variable that names one of `sections` and no setting of it: it would be ignored."""
    wrong = unknown_variables(environ, sections)
    if wrong:
        text, _, near = wrong[0].partition(": ")
        raise ConfigError(f"environment: {text}", fix=near or f"unset {text.split()[0]}")


def explain(settings: list[Setting], *, only_set: bool = False) -> list[str]:
    """One line a setting: name, value and where it came from."""
    chosen = [s for s in settings if not only_set or s.source != "default"]
    width = max((len(s.name) for s in chosen), default=0)
    return [f"{s.name:<{width}}  {s.value!r:<24}  {s.source}" for s in chosen]


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values of one config, for JSON."""
    return dataclasses.asdict(config)


def _environment_layer(
    section: str, names: Mapping[str, Any], environ: Mapping[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    found = {n: environ[env_name(section, n)] for n in names if env_name(section, n) in environ}
    return [("environment", found)] if found else []


def _unknown_key(key: str, section: str, where: str, names: Mapping[str, Any]) -> ConfigError:
    near = difflib.get_close_matches(key, names, n=1)
    return ConfigError(
        f"{where}: [{section}] has no key {key!r}",
        field=key,
        fix=f"did you mean {near[0]!r}?" if near else f"keys are: {', '.join(sorted(names))}",
    )


def _checked(raw: Any, hint: Any, f: dataclasses.Field[Any], name: str, where: str) -> Any:
    """The value of one field. Every ConfigError has a fix: where no better one is known, what the field is."""
    try:
        if isinstance(raw, str) and hint in (int, float, bool) and where.startswith("file"):
            what = "true or false" if hint is bool else hint.__name__
            raise ConfigError(
                f"{where}: {name} must be {what}, not {raw!r}", field=name, fix=_unquoted(f, raw, hint)
            )
        value = _coerce(raw, hint, name, where)
        _check_range(value, f, name, where)
    except ConfigError as e:
        e.fix = e.fix or f"{name} is: {f.metadata['doc']} (default: {f.default!r})"
        raise
    return value


def _unquoted(f: dataclasses.Field[Any], text: str, hint: Any) -> str | None:
    """What to write instead of a string that holds a value of the right type; None where it holds none."""
    try:
        _coerce(text, hint, f.name, "")
    except ConfigError:
        return None
    return f"write it without quotes: {f.name} = {text}"


def _coerce(raw: Any, hint: Any, name: str, where: str) -> Any:
    """Turn a TOML value, a flag's string or an environment string into the field's type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if raw is None else _coerce(raw, inner[0], name, where)
    if origin is tuple:
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{where}: {name} must be a list, not {raw!r}", field=name)
        kind = typing.get_args(hint)[0]
        if kind is int:
            items = [n for item in items for n in _expand_range(item)]
        return tuple(_coerce(i, kind, name, where) for i in items if i != "")
    if hint is bool:
        return _bool(raw, name, where)
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, str) and hint in (int, float):
        try:
            return hint(raw)
        except ValueError:
            raise ConfigError(f"{where}: {name} must be {hint.__name__}, not {raw!r}", field=name) from None
    if not isinstance(raw, hint) or isinstance(raw, bool):
        raise ConfigError(f"{where}: {name} must be {hint.__name__}, not {raw!r}", field=name)
    return raw


def _expand_range(item: Any) -> list[Any]:
    """'0-3' is 0, 1, 2, 3, as in cpusets."""
    if isinstance(item, str) and "-" in item:
        low, _, high = item.partition("-")
        if low.isdigit() and high.isdigit():
            return list(range(int(low), int(high) + 1))
    return [item]


def _bool(raw: Any, name: str, where: str) -> bool:
    if isinstance(raw, bool):
        return raw
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(raw, str) and raw.lower() in known:
        return known[raw.lower()]
    raise ConfigError(f"{where}: {name} must be true or false, not {raw!r}", field=name)


def _check_range(value: Any, f: dataclasses.Field[Any], name: str, where: str) -> None:
    low, high, one_of = f.metadata.get("low"), f.metadata.get("high"), f.metadata.get("one_of")
    if one_of and value not in one_of:
        near = difflib.get_close_matches(str(value), one_of, n=1)
        raise ConfigError(
            f"{where}: {name} is {value!r}",
            field=name,
            fix=f"one of {', '.join(one_of)}" + (f"; did you mean {near[0]!r}?" if near else ""),
        )
    if isinstance(value, float) and not math.isfinite(value):  # nan is neither below nor above any bound
        raise ConfigError(f"{where}: {name} is {value!r}, must be a finite number", field=name)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{where}: {name} is {value!r}, must be {bounds}", field=name)
