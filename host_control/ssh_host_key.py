"""Whether a host is who it was: its key against known_hosts. Nothing is accepted silently."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from cross.errors import SecurityError
from host_control.known_hosts import find_keys, fingerprint, judge, record
from host_control.ssh_host import SshHost


def known_kinds(host: SshHost) -> frozenset[str]:
    """The kinds of key that a host is known by, as signature algorithms."""
    keys = [key for name in host.key_names for key in find_keys(_files(host), name)]
    kinds = {key.kind for key in keys if not key.revoked}
    return frozenset(kinds | ({"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in kinds else set()))


def check_host_key(host: SshHost, kind: str, blob: bytes, *, accept_new: bool) -> None:
    """Return where `blob` is a key that known_hosts gives for `host`; otherwise SecurityError (19) with what to do.

    `accept_new` records the key of a host not known at all, and of no other.
    """
    shown = f"{kind} {fingerprint(blob)}"
    name, *others = host.key_names
    verdict, place = judge(find_keys(_files(host), name), blob)
    for other in others if verdict == "unknown" else ():
        # A key known for the host without its port counts, as for OpenSSH; another one says nothing of this port.
        found, there = judge(find_keys(_files(host), other), blob)
        verdict, place = (found, there) if found in ("known", "revoked") else (verdict, place)
    if verdict == "known":
        return
    if verdict == "unknown" and accept_new and host.user_known_hosts:
        record(host.user_known_hosts[0], name, kind, blob, hashed=host.hash_known_hosts)
        print(f"{host}: recorded host key {shown} in {host.user_known_hosts[0]}", file=sys.stderr)
        return
    if verdict == "unknown":
        raise SecurityError(
            f"the host key of {host} is not known: {shown}. "
            f"If that is the board's own, repeat once with: {repeat_command('--accept-new')}"
        )
    reason = "is revoked by" if verdict == "revoked" else "is not the one in"
    remedy = f"ssh-keygen -f {shlex.quote(place.rpartition(':')[0])} -R {shlex.quote(name)}"
    raise SecurityError(
        f"the host key of {host}, {shown}, {reason} {place}: someone may be in between. "
        f"If the board was set up anew: {remedy}"
    )


def repeat_command(flag: str) -> str:
    """The command line of this process with one more flag, to be typed again."""
    program = Path(sys.argv[0] or "taste-edge")
    start = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*start, *sys.argv[1:], flag])


def _files(host: SshHost) -> tuple[Path, ...]:
    return (*host.user_known_hosts, *host.global_known_hosts)
