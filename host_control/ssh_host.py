"""Which host an SSH name means: what OpenSSH's own client makes of it, asked with `ssh -G` where it is installed."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cross.errors import UsageError

_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_CONFIG_S = 10


@dataclass(frozen=True)
class SshHost:
    """Everything needed to reach one host. `name` is what the user wrote; `key_name` is what known_hosts calls it.

    `jumps` are the hosts to go through, first hop first. `agent` is the agent's socket, or None for no agent.
    """

    name: str
    address: str
    port: int
    user: str
    key_names: tuple[str, ...]
    identity_files: tuple[Path, ...]
    identities_only: bool
    agent: str | None
    user_known_hosts: tuple[Path, ...]
    global_known_hosts: tuple[Path, ...]
    hash_known_hosts: bool
    jumps: tuple[str, ...]

    def __str__(self) -> str:
        where = self.address if self.port == 22 else f"{self.address}:{self.port}"
        return self.name if self.name in (where, self.address) else f"{self.name} ({where})"


def resolve_host(name: str, config: Path | None = None) -> SshHost:
    """The host that `name` means: an alias, HOST, USER@HOST, HOST:PORT or ssh://USER@HOST:PORT.

    `config` stands in place of ~/.ssh/config. Without OpenSSH's client the name is taken as it is, with OpenSSH's
    default files. Raises UsageError for what can be no host, or where the configuration cannot be read or followed.
    """
    user, host, port = split_name(name)
    if shutil.which("ssh") is None:
        return _make_host(name, host, {"user": [user or ""], "port": [str(port or 22)]})
    command = ["ssh", "-G", *(["-F", str(config)] if config else [])]
    command += [*(["-l", user] if user else []), *(["-p", str(port)] if port else []), "--", host]
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=_CONFIG_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"`ssh -G {host}` did not end within {_CONFIG_S} s. Check ~/.ssh/config.") from None
    if shown.returncode != 0:
        said = " ".join(shown.stderr.split()) or f"exit code {shown.returncode}"
        raise UsageError(f"`ssh -G {host}` failed: {said}. Check ~/.ssh/config and the name of the board.")
    return _make_host(name, host, _parse(shown.stdout))


def split_name(name: str) -> tuple[str | None, str, int | None]:
    """User, host and port of [ssh://][USER@]HOST[:PORT]; UsageError where that is not what `name` is."""
    user, at, rest = name.removeprefix("ssh://").rpartition("@")
    bracketed, plain, bare_ipv6 = (
        r"\[([\w:.%]+)\](?::(\d+))?",
        r"([^:\[\]]+)(?::(\d+))?",
        r"([\da-fA-F.]*:[\da-fA-F.]*:[\w:.%]*)",
    )
    match = re.fullmatch(f"{bracketed}|{plain}|{bare_ipv6}", rest)
    host, port = (match[1] or match[3] or match[5], match[2] or match[4]) if match else ("", None)
    unfit = re.compile(r"[\s\x00-\x1f\x7f/\\'\"`$;|&<>(){}*?!]")
    if not host or host.startswith("-") or unfit.search(host) or (at and (not user or user.startswith("-"))):
        raise UsageError(f"unknown board {name!r}. Known: local, HOST, USER@HOST:PORT, emulated:TARGET, recorded:FILE.")
    if port and not 0 < int(port) < 65536:
        raise UsageError(f"port {port} of board {name!r} is not one of 1 to 65535.")
    return user or None, host, int(port) if port else None


def _parse(shown: str) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for line in shown.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value.strip())
    return options


def _make_host(name: str, host: str, options: dict[str, list[str]]) -> SshHost:
    def first(key: str, otherwise: str = "") -> str:
        value = options.get(key, [otherwise])[0]
        return otherwise if value == "none" else value

    if proxy := first("proxycommand"):
        raise UsageError(f"board {name} needs ProxyCommand {proxy!r}, which is not supported. Use ProxyJump instead.")
    address, port, user = first("hostname", host), int(first("port", "22")), first("user") or getpass.getuser()
    tokens = {"%": "%", "d": str(Path.home()), "h": address, "n": host, "p": str(port), "r": user}

    def paths(values: list[str]) -> tuple[Path, ...]:
        expanded = [re.sub(r"%([%dhnpr])", lambda match: tokens[match[1]], value) for value in values]
        return tuple(Path(value).expanduser() for value in expanded if value and value != "none")

    numbered = address if port == 22 else f"[{address}]:{port}"
    alias = first("hostkeyalias")
    agent = first("identityagent", "SSH_AUTH_SOCK") if options.get("identityagent") != ["none"] else ""
    return SshHost(
        name=name,
        address=address,
        port=port,
        user=user,
        key_names=(alias,) if alias else tuple(dict.fromkeys((numbered, address))),
        identity_files=paths(options.get("identityfile", list(_DEFAULT_KEYS))),
        identities_only=first("identitiesonly") == "yes",
        agent=_agent_socket(agent),
        user_known_hosts=paths(_split_paths(first("userknownhostsfile", _USER_KNOWN_HOSTS))),
        global_known_hosts=paths(_split_paths(first("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS))),
        hash_known_hosts=first("hashknownhosts") == "yes",
        # `Host *` with a ProxyJump names the jump host itself too; like OpenSSH, nobody jumps through himself.
        jumps=tuple(
            jump for jump in first("proxyjump").split(",") if jump and split_name(jump)[1] not in (host, address)
        ),
    )


def _agent_socket(setting: str) -> str | None:
    if setting == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if setting.startswith("$"):
        return os.environ.get(setting[1:].strip("{}")) or None
    return os.path.expanduser(setting) or None


def _split_paths(value: str) -> list[str]:
    """`ssh -G` separates files by spaces and quotes nothing, so a path that exists as a whole is taken as one."""
    return [value] if Path(value).expanduser().exists() else value.split()
