"""Reaching a host over TCP, in bounded time."""

from __future__ import annotations

import socket
import threading
import time

from cross.errors import LinkLostError, UsageError
from host_control.connection import ANSWER_S
from host_control.ssh_host import SshHost


def dial(host: SshHost, answer_s: float = ANSWER_S) -> socket.socket:
    """A TCP connection whose death the kernel notices within 15 s; every address of the host is tried in turn."""
    until, last = time.monotonic() + answer_s, ""
    for family, kind, protocol, _, address in _look_up(host, answer_s):
        link = socket.socket(family, kind, protocol)
        try:
            link.settimeout(max(0.1, until - time.monotonic()))
            link.connect(address)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                ("TCP_KEEPIDLE", 5),
                ("TCP_KEEPINTVL", 3),
                ("TCP_KEEPCNT", 3),
                ("TCP_USER_TIMEOUT", 15000),
            ):
                if hasattr(socket, option):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            return link
        except OSError as error:
            link.close()
            last = (
                f"no answer within {answer_s:.0f} s"
                if isinstance(error, TimeoutError)
                else error.strerror or str(error)
            )
    raise LinkLostError(
        f"cannot reach {host} at {host.address} port {host.port}: {last}. Check that it is up and that sshd runs there."
    )


def _look_up(
    host: SshHost, answer_s: float
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]]:
    """Addresses of a host, in bounded time; an unknown name that is no alias either is a wrong --board (2)."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(socket.getaddrinfo(host.address, host.port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.append(error)

    resolver = threading.Thread(target=ask, daemon=True)
    resolver.start()
    resolver.join(answer_s)
    if not found:
        raise LinkLostError(f"no name server answered for {host.address} within {answer_s:.0f} s. Check the network.")
    answer = found[0]
    if isinstance(answer, list):
        return answer
    unknown = isinstance(answer, socket.gaierror) and answer.errno == socket.EAI_NONAME
    if unknown or "." not in host.address:
        raise UsageError(
            f"unknown board {host.name!r}: no host {host.address} is known. "
            "Known: local, HOST, USER@HOST:PORT, emulated:TARGET, recorded:FILE.json."
        )
    raise LinkLostError(f"cannot look up {host.address}: {answer}. Check the network.")
