"""A deployment file (deploy/*.toml), read and checked into frozen dataclasses. Starts nothing, asks no machine.

    [deployment]  name, model, restart ...         DeploymentConfig
    [engine]      what all engines share           ProgramConfig
    [prefill]     replicas and what differs        GroupConfig    \\ a pair, x of these
    [decode]                                       GroupConfig    / and y of those (xPyD)
    [unified]     instead of a pair                GroupConfig
    [transfer] [server] [router] [hosts]

An engine's settings come from, weakest first: defaults, [deployment] model and engine, [engine], its role's section,
SPLITSERVE_ENGINE_*, SPLITSERVE_<ROLE>_*, --set engine.*, --set <role>.*. Thus an environment variable beats the
file and a flag beats both, whichever section they name.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from splitserve.config import (
    SECTIONS,
    DeploymentConfig,
    EngineConfig,
    GroupConfig,
    HostsConfig,
    ProgramConfig,
    RouterConfig,
    ServerConfig,
    Setting,
    TransferConfig,
    check_environment,
    env_name,
    resolve,
)
from splitserve.errors import ConfigError
from splitserve.launch import engines
from splitserve.launch.engines.seat import Program
from splitserve.types import Role

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}", re.IGNORECASE)
_SECTIONS = tuple(SECTIONS)

Layer = tuple[str, dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Equal engines of one role. `given` names the settings of `engine` that are not mere defaults."""

    role: Role
    replicas: int
    engine: EngineConfig
    program: Program
    given: frozenset[str]


@dataclass(frozen=True)
class Deployment:
    """Everything a deployment file says, with defaults filled in, and where each value came from."""

    path: str
    config: DeploymentConfig
    groups: tuple[Group, ...]
    transfer: TransferConfig
    server: ServerConfig
    router: RouterConfig
    hosts: HostsConfig
    settings: tuple[Setting, ...]

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def split(self) -> bool:
        """True for prefill and decode apart, False for unified engines."""
        return self.groups[0].role is not Role.UNIFIED


def load(
    path: str | Path, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Deployment:
    """Read a deployment file; `overrides` are "section.key=value" strings, as given to --set.

    Raises ConfigError for a missing or broken file, unknown sections and keys, wrong types and values, roles
    without their partner, and engines that name the same cpu.
    """
    source = f"file {path}"
    return parse(_read(Path(path)), source, stem=Path(path).stem, overrides=overrides, environ=environ)


def parse(
    tables: Mapping[str, Any],
    source: str,
    *,
    stem: str = "deployment",
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Deployment:
    """`load` for tables already read."""
    _check_sections(tables, source)
    environ = os.environ if environ is None else environ
    check_environment(environ)
    given = _Given(tables, source, _flag_layers(overrides), environ)
    config, settings = given.section(DeploymentConfig, "deployment")
    config = _named(config, stem)
    given.section(ProgramConfig, "engine")  # so that a wrong key is reported under [engine], not under a role
    groups = []
    for role in _roles(tables, source):
        group, of_group = given.group(role, config)
        _check_group(group, role, source)
        groups.append(_group(group, role, _given_names(of_group)))
        engines.check(groups[-1].program, role, groups[-1].given, source)
        settings += of_group
    transfer, of_transfer = given.section(TransferConfig, "transfer")
    server, of_server = given.section(ServerConfig, "server")
    router, of_router = given.section(RouterConfig, "router")
    hosts, of_hosts = given.section(HostsConfig, "hosts")
    settings += [*of_transfer, *of_server, *of_router, *of_hosts]
    _check_cpus(groups, source)
    engines.check_pair({g.role: g.program for g in groups}, source)
    program = groups[0].program
    named = {s.name for s in (*of_transfer, *of_server) if s.source != "default"}
    engines.check_sections(program, transfer, server, named, source)
    router = _asks(router, program, "engine" in _given_names(of_router), source)
    _check_alike(groups, source)
    path = source.removeprefix("file ")
    return Deployment(path, config, tuple(groups), transfer, server, router, hosts, tuple(settings))


@dataclass(frozen=True)
class _Given:
    """All that was given for one deployment, by section."""

    tables: Mapping[str, Any]
    source: str
    flags: Mapping[str, list[Layer]]
    env: Mapping[str, str]

    def section(self, cls: type[T], name: str) -> tuple[T, list[Setting]]:
        """One plain section: file < environment < flags."""
        file = (self.source, dict(self.tables.get(name, {})))
        return resolve(cls, name, file, *self.flags.get(name, []), environ=self.env)

    def group(self, role: Role, config: DeploymentConfig) -> tuple[GroupConfig, list[Setting]]:
        """A role's section over [engine], in the order that the module's docstring gives."""
        default = DeploymentConfig()
        both = {
            n: getattr(config, n) for n in ("model", "engine") if getattr(config, n) != getattr(default, n)
        }
        layers: list[Layer] = [(f"{self.source} [deployment]", both)]
        layers.append((f"{self.source} [engine]", dict(self.tables.get("engine", {}))))
        layers.append((self.source, dict(self.tables[role])))
        names = {f.name: env_name("engine", f.name) for f in fields(ProgramConfig)}
        layers += [(f"environment {n}", {key: self.env[n]}) for key, n in names.items() if n in self.env]
        layers += [*self.flags.get("engine", []), *self.flags.get(role, [])]
        return resolve(GroupConfig, role, *layers, environ=self.env)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        near = sorted(Path("deploy").glob("*.toml"))
        fix = (
            f"ready-made files: {', '.join(map(str, near))}" if near else "see docs/deploy.md for the format"
        )
        raise ConfigError(f"no deployment file {path}", fix=fix) from None
    except OSError as e:
        raise ConfigError(
            f"cannot read {path}: {e.strerror}", fix="give a file that this user may read"
        ) from e
    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not TOML: {e}", fix="see docs/deploy.md for the format") from e


def _check_sections(tables: Mapping[str, Any], source: str) -> None:
    for name, table in tables.items():
        if name not in _SECTIONS:
            near = difflib.get_close_matches(name, _SECTIONS, n=1)
            fix = f"did you mean [{near[0]}]?" if near else f"sections are: {', '.join(_SECTIONS)}"
            raise ConfigError(f"{source}: unknown section [{name}]", field=name, fix=fix)
        if not isinstance(table, dict):
            raise ConfigError(
                f"{source}: {name} must be a section", field=name, fix=f"write [{name}] on its own line"
            )


def _roles(tables: Mapping[str, Any], source: str) -> list[Role]:
    """The roles of the file in starting order; ConfigError where they make no whole deployment."""
    given = [role for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED) if role in tables]
    match given:
        case [Role.PREFILL, Role.DECODE] | [Role.UNIFIED]:
            return given
        case []:
            raise ConfigError(f"{source} has no engines", fix="add [prefill] and [decode], or [unified]")
        case [Role.PREFILL | Role.DECODE as lone]:
            other = Role.DECODE if lone is Role.PREFILL else Role.PREFILL
            raise ConfigError(
                f"{source} has [{lone}] but no [{other}]",
                field=lone,
                fix=f"add [{other}], or use [unified] alone",
            )
        case _:
            raise ConfigError(
                f"{source} has [unified] beside [{given[0]}]",
                field="unified",
                fix="use a pair or unified engines, not both",
            )


def _flag_layers(overrides: Sequence[str]) -> dict[str, list[Layer]]:
    """--set strings by section, in the order given."""
    layers: dict[str, list[Layer]] = {}
    for text in overrides:
        name, eq, value = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not eq or not dot or section not in _SECTIONS:
            near = difflib.get_close_matches(section, _SECTIONS, n=1) if eq and dot else []
            fix = f"write --set SECTION.KEY=VALUE; sections are: {', '.join(_SECTIONS)}"
            fix = f"did you mean {near[0]}.{key}={value}? {fix}" if near else fix
            raise ConfigError(f"--set {text}: not a setting", fix=fix)
        layers.setdefault(section, []).append((f"flag --set {text}", {key: value}))
    return layers


def _named(config: DeploymentConfig, stem: str) -> DeploymentConfig:
    name = config.name or stem
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"deployment name {name!r} cannot name a directory",
            field="name",
            fix="set [deployment] name to at most 40 letters, digits, dots, dashes or underscores",
        )
    return replace(config, name=name)


def _given_names(settings: Sequence[Setting]) -> frozenset[str]:
    """Which of them stand somewhere, without their section's name."""
    return frozenset(s.name.partition(".")[2] for s in settings if s.source != "default")


def _group(group: GroupConfig, role: Role, given: frozenset[str]) -> Group:
    program = Program(group.engine, group.python, group.args, group.env)
    return Group(role, group.replicas, replace(group.settings(), role=str(role)), program, given)


def _asks(router: RouterConfig, program: Program, given: bool, source: str) -> RouterConfig:
    """The router speaks the protocol of the engines that it stands in front of."""
    if given and router.engine != program.name:
        raise ConfigError(
            f"{source}: [router] engine is {router.engine}, but the engines are {program.name}",
            field="engine",
            fix="remove it there: [deployment] engine says it for all",
        )
    return replace(router, engine=program.name)


def _check_group(group: GroupConfig, role: Role, source: str) -> None:
    if not group.model:
        raise ConfigError(
            f"{source}: no model for [{role}]",
            field="model",
            fix="set [deployment] model to a checkpoint directory, a .gguf file or smollm2-135m",
        )
    if group.role not in ("unified", str(role)):  # "unified" is the default of the field
        raise ConfigError(
            f"{source}: [{role}] says role = {group.role!r}",
            field="role",
            fix="remove role: the section says it",
        )
    wanted = group.replicas * group.tp
    if group.cpus and len(group.cpus) < wanted:
        raise ConfigError(
            f"{source}: [{role}] has {group.replicas} x {group.tp} ranks but names {len(group.cpus)} cpus",
            field="cpus",
            fix=f"name at least {wanted} cpus, or leave cpus out",
        )


def _check_cpus(groups: Sequence[Group], source: str) -> None:
    """No cpu may be named twice, by one group or by two."""
    owner: dict[int, Role] = {}
    for group in groups:
        for cpu in group.engine.cpus:
            if cpu in owner:
                raise ConfigError(
                    f"{source}: cpu {cpu} is given to [{owner[cpu]}] and to [{group.role}]",
                    field="cpus",
                    fix="name each cpu once, or leave cpus out and let them be chosen",
                )
            owner[cpu] = group.role


def _check_alike(groups: Sequence[Group], source: str) -> None:
    """What both halves of a pair must agree on, for one's rows to mean the same at the other.

    They compare all of it when they meet (transfer/layout.py); this says the obvious before anything is loaded.
    """
    for name in ("page_tokens", "dtype", "kv_dtype", "speculative"):
        values = {str(g.role): getattr(g.engine, name) for g in groups}
        # dtype "auto" may come out as what the other side names; of kv_dtype's two values one is "auto".
        meant = {v for v in values.values() if name != "dtype" or v != "auto"}
        if len(meant) > 1:
            raise ConfigError(
                f"{source}: {name} differs: " + ", ".join(f"[{role}] has {v}" for role, v in values.items()),
                field=name,
                fix=f"set {name} in [engine], for both",
            )
