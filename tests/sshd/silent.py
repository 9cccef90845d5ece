"""Servers that accept and then fall silent, each at another stage, and a relay that cuts or freezes a link."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from paramiko.sftp import SFTP_OK

if TYPE_CHECKING:
    from typing_extensions import Buffer

STAGES = ("banner", "keys", "auth", "open", "exec", "read", "sftp", "stat", "write", "close")
_LONGEST_S = 60.0


class _Stalling(paramiko.ServerInterface):
    """Says yes to everything up to `stage`, and nothing from there on."""

    def __init__(self, stage: str, over: threading.Event) -> None:
        self._stage, self._over = stage, over

    def _stall_at(self, stage: str) -> None:
        if stage == self._stage:
            self._over.wait(_LONGEST_S)

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_none(self, username: str) -> int:
        self._stall_at("auth")
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self._stall_at("open")
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self._stall_at("exec")
        return True

    def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
        if self._stage in ("stat", "write", "close"):
            return super().check_channel_subsystem_request(channel, name)
        return True

    def check_global_request(self, kind: str, msg: paramiko.Message) -> bool:
        self._stall_at("read")
        return False


class _StallingFile(paramiko.SFTPHandle):
    def __init__(self, stage: str, over: threading.Event) -> None:
        super().__init__()
        self._stage, self._over = stage, over

    def write(self, offset: int, data: Buffer) -> int:
        if self._stage == "write":
            self._over.wait(_LONGEST_S)
        return SFTP_OK

    def close(self) -> None:
        if self._stage == "close":
            self._over.wait(_LONGEST_S)


class _StallingFiles(paramiko.SFTPServerInterface):
    def __init__(self, server: paramiko.ServerInterface, stage: str, over: threading.Event) -> None:
        super().__init__(server)
        self._stage, self._over = stage, over

    def stat(self, path: str) -> paramiko.SFTPAttributes:
        if self._stage == "stat":
            self._over.wait(_LONGEST_S)
        return paramiko.SFTPAttributes()

    def open(self, path: str, flags: int, attr: paramiko.SFTPAttributes) -> paramiko.SFTPHandle:
        return _StallingFile(self._stage, self._over)


@contextlib.contextmanager
def run_silent(stage: str) -> Iterator[int]:
    """The port of a server that falls silent at `stage` (one of STAGES)."""
    over, links, transports = threading.Event(), list[socket.socket](), list[paramiko.Transport]()
    key = paramiko.ECDSAKey.generate()

    def serve(link: socket.socket) -> None:
        if stage == "banner":
            return
        if stage == "keys":
            link.sendall(b"SSH-2.0-silent\r\n")
            return
        transport = paramiko.Transport(link)
        transports.append(transport)
        transport.add_server_key(key)
        transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _StallingFiles, stage, over)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(event=threading.Event(), server=_Stalling(stage, over))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                links.append(link)
                serve(link)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(5)
            for transport in transports:
                transport.close()
            for link in links:
                link.close()


def write_config(folder: Path, port: int) -> Path:
    """A client configuration for a server on `port` with known_hosts of its own."""
    config = folder / "ssh_config"
    config.write_text(
        f"Host *\n  HostName 127.0.0.1\n  Port {port}\n  User nobody\n  IdentityFile none\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
    )
    return config


class Relay:
    """Passes bytes between a client and 127.0.0.1:`port`; after `limit` bytes from the client nothing passes any more.

    `frozen`: both ends stay connected and hear nothing, as on a cut cable. Otherwise both are closed.
    """

    def __init__(self, port: int, *, limit: int | None = None, frozen: bool = True) -> None:
        self._target, self._limit, self._frozen = port, limit, frozen
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._links: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._passed = 0
        self.stopped = threading.Event()

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._hang_up()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
        for link in self._links:
            link.close()

    def freeze(self) -> None:
        self._limit = self._passed

    def cut(self) -> None:
        """Hang up, and hang up on whoever calls again, until `mend`."""
        self.freeze()
        self._frozen = False
        self._hang_up()

    def mend(self) -> None:
        self._limit = None

    def _hang_up(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._links += [client, server]
                for source, sink, counted in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pass, args=(source, sink, counted), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                while self._limit is not None and self._passed >= self._limit and not self.stopped.is_set():
                    if not self._frozen:
                        self._hang_up()
                        return
                    time.sleep(0.02)
                sink.sendall(data)
                self._passed += len(data) if counted else 0
            sink.shutdown(socket.SHUT_WR)
