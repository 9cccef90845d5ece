"""A connection to a host over SSH: opens when first needed, is a context manager, has run, put and get.

    with Connection("pi@raspberrypi.local") as board:
        print(board.run(["uname", "-m"]).stdout)

Hosts are resolved as OpenSSH does (host_control.ssh_host), host keys are enforced (host_control.known_hosts), and every
operation ends within 20 s on a host that falls silent: paramiko itself waits for ever in several places (exec, opening
SFTP, a full send buffer), so a watch closes the socket under it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import paramiko

from cross.errors import (
    CompatibilityError,
    FileError,
    LinkLostError,
    MissingToolError,
    NoSpaceError,
    TasteError,
    UsageError,
)
from host_control.connection import ANSWER_S, READ_BYTES, SAVE_S, Lines, RunResult, shell_line, tied_arguments
from host_control.ssh_auth import Ask, Remembered, ask_terminal, authenticate
from host_control.ssh_dial import dial
from host_control.ssh_host import SshHost, resolve_host
from host_control.ssh_host_key import check_host_key, known_kinds

_QUIET_SHARE = 0.25
_BLOCK_BYTES = 32 << 10
_MAX_JUMPS = 8
_SLICE_S = 1.0

# Failures reach the user as one line of ours; paramiko's tracebacks of its own thread would come before it.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _Watch(threading.Thread):
    """Aborts what does not come to its end in time; `extend` after each piece of progress."""

    def __init__(self, seconds: float, abort: threading.Event, link: Connection) -> None:
        super().__init__(daemon=True)
        self.expired = False
        self._seconds, self._done, self._link = seconds, abort, link
        self._until = time.monotonic() + seconds

    def extend(self) -> None:
        self._until = time.monotonic() + self._seconds

    def run(self) -> None:
        while (left := self._until - (now := time.monotonic())) > 0:
            if self._done.wait(min(left, _SLICE_S)):
                return
            # Where this process itself was stopped (Ctrl-Z, a suspended machine), nobody has waited.
            stopped = time.monotonic() - now - _SLICE_S
            if stopped > _SLICE_S:
                self._until += stopped
        self.expired = True
        self._link.abort()


class Connection:
    """One host. `host` is an alias of ~/.ssh/config or [USER@]HOST[:PORT]; `ssh_config` stands in place of that file.

    `accept_new` records the key of a host that is not known yet; `answer_s` is how long a silent host is waited for.
    Raises UsageError (2) for what can be no host, LinkLostError (17), SecurityError (19) for a host key that is unknown
    or wrong, AuthenticationError (21).
    """

    def __init__(
        self,
        host: str,
        *,
        accept_new: bool = False,
        ssh_config: Path | None = None,
        ask: Ask = ask_terminal,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.name = host
        self.host: SshHost = resolve_host(host, ssh_config)
        self._accept_new = accept_new
        self._ssh_config = ssh_config
        self._ask = Remembered(ask)
        self._answer_s = answer_s
        self._socket: socket.socket | paramiko.Channel | None = None
        self._transport: paramiko.Transport | None = None
        self._files: paramiko.SFTPClient | None = None
        self._gateway: Connection | None = None
        self._depth = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> paramiko.Transport:
        """Connect, check the host key and log in, unless that is done already."""
        if self._transport is not None and self._transport.is_active():
            return self._transport
        self.close()
        try:
            self._transport = self._negotiate()
            self._check_host_key(self._transport)
            authenticate(self._transport, self.host, self._bounded, self._ask)
            self._ask.keep()
        except BaseException:
            self.close()
            raise
        return self._transport

    def close(self) -> None:
        """Hang up; idempotent. What runs tied to this connection is ended by its own watcher on the board."""
        self.abort()
        self._transport = self._socket = self._files = None
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None

    def abort(self) -> None:
        """Close the link from any thread: whatever waits on it ends at once."""
        transport, link = self._transport, self._socket
        if isinstance(link, socket.socket):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if transport is not None:
            with contextlib.suppress(Exception):
                transport.close()
        if link is not None:
            with contextlib.suppress(Exception):
                link.close()

    def run(self, arguments: Sequence[str], *, timeout: float | None = None, tied: bool = False) -> RunResult:
        """Run a command to its end; the exit code is its own, whatever it is.

        LinkLostError after `timeout` seconds, or as soon as the host falls silent; a `tied` command is ended with the
        channel.
        """
        words = tied_arguments(arguments) if tied else list(arguments)
        what = os.path.basename(arguments[0])
        channel, output, messages = self._open_session(), bytearray(), bytearray()
        try:
            with self._bounded(f"start {what}"):
                channel.exec_command(os.fsencode(shell_line(words)))
                if not tied:
                    channel.shutdown_write()
            return self._collect(channel, tuple(arguments), timeout or self._answer_s, output.extend, messages, output)
        finally:
            self._close_channel(channel)

    def follow(self, arguments: Sequence[str], on_line: Callable[[str], None]) -> RunResult:
        """As in host_control.connection. A link that is lost ends the command, which saves as after Ctrl-C."""
        channel, words = self._open_session(), tuple(arguments)
        lines, messages = Lines(on_line), bytearray()
        try:
            with self._bounded(f"start {os.path.basename(arguments[0])}"):
                channel.exec_command(os.fsencode(shell_line(tied_arguments(arguments))))
            try:
                return self._collect(channel, words, math.inf, lines.feed, messages)
            except KeyboardInterrupt:
                with self._bounded("end the program"):
                    channel.shutdown_write()
                return self._collect(channel, words, SAVE_S, lines.feed, messages)
        finally:
            self._close_channel(channel)

    def put(self, source: Path, path: str, *, offset: int = 0) -> int:
        """As in host_control.connection: returns the bytes sent; a cut leaves what had arrived.

        Every block is answered before the next: paramiko's pipelined writes drop the server's errors.
        """
        sent = 0
        with source.open("rb") as reader, self._file_calls("write", path) as (files, watch):
            reader.seek(offset)
            with files.open(os.fsencode(path), "r+" if offset else "w") as writer:
                writer.seek(offset)
                while block := reader.read(_BLOCK_BYTES):
                    writer.write(block)
                    watch.extend()
                    sent += len(block)
        return sent

    def get(self, path: str, destination: Path) -> None:
        """Fetch one file."""
        with destination.open("wb") as writer, self._file_calls("read", path) as (files, watch):
            with files.open(os.fsencode(path), "r") as reader:
                reader.prefetch(reader.stat().st_size)
                while block := reader.read(_BLOCK_BYTES):
                    writer.write(block)
                    watch.extend()

    def read(self, path: str, offset: int = 0) -> bytes | None:
        """As in host_control.connection."""
        data = bytearray()
        with self._file_calls("read", path) as (files, watch):
            try:
                with files.open(os.fsencode(path), "r") as reader:
                    reader.seek(offset)
                    while len(data) < READ_BYTES:
                        block = reader.read(_BLOCK_BYTES)
                        data += block
                        watch.extend()
                        # A short one has met the end: asking again would take the link's time once more.
                        if len(block) < _BLOCK_BYTES:
                            break
            except FileNotFoundError:
                return None
        return bytes(data)

    def home(self) -> str:
        """The folder that a login starts in."""
        with self._file_calls("find", "the home folder") as (files, _):
            return files.normalize(".")

    def size(self, path: str) -> int | None:
        with self._file_calls("read", path) as (files, _):
            try:
                attributes = files.stat(os.fsencode(path))
            except FileNotFoundError:
                return None
        return attributes.st_size if stat.S_ISREG(attributes.st_mode or 0) else None

    def names(self, path: str) -> list[str]:
        with self._file_calls("list", path) as (files, _):
            try:
                return sorted(files.listdir(path))
            except FileNotFoundError:
                return []

    def rename(self, old: str, new: str) -> None:
        with self._file_calls("rename", new) as (files, _):
            files.posix_rename(os.fsencode(old), os.fsencode(new))

    def link(self, target: str, path: str) -> None:
        with self._file_calls("link", path) as (files, _):
            files.symlink(os.fsencode(target), os.fsencode(path))

    def read_link(self, path: str) -> str | None:
        with self._file_calls("read", path) as (files, _):
            try:
                if not stat.S_ISLNK(files.lstat(os.fsencode(path)).st_mode or 0):
                    return None
                return files.readlink(os.fsencode(path))
            except FileNotFoundError:
                return None

    def forward(self, address: str, port: int) -> paramiko.Channel:
        """A byte stream to another host, as seen from this one."""
        transport = self.open()
        with self._bounded(f"reach {address}:{port}"):
            return transport.open_channel("direct-tcpip", (address, port), ("127.0.0.1", 0))

    def _negotiate(self) -> paramiko.Transport:
        """A transport whose keys are exchanged, and nothing else: nobody has checked yet who it is."""
        self._socket = self._dial()
        try:
            with self._bounded("exchange keys"):
                transport = self._transport = paramiko.Transport(self._socket)
                # paramiko measures by the calendar, which may be set at any time: the watch bounds everything.
                transport.banner_timeout = transport.auth_timeout = transport.channel_timeout = math.inf
                options, known = transport.get_security_options(), known_kinds(self.host)
                # Another kind of key of the same host would look like a change.
                options.key_types = sorted(options.key_types, key=lambda kind: kind not in known)
                transport.start_client()
                transport.get_remote_server_key()
        except paramiko.ssh_exception.IncompatiblePeer as error:
            raise CompatibilityError(f"{self.host} and this host share no cipher: {error}. Update its sshd.") from error
        return transport

    def _dial(self) -> socket.socket | paramiko.Channel:
        if not self.host.jumps:
            return dial(self.host, self._answer_s)
        *before, last = self.host.jumps
        if self._depth >= _MAX_JUMPS:
            raise UsageError(f"{self.host} is behind more than {_MAX_JUMPS} jumps. Check ProxyJump in ~/.ssh/config.")
        self._gateway = Connection(
            last, accept_new=self._accept_new, ssh_config=self._ssh_config, ask=self._ask, answer_s=self._answer_s
        )
        self._gateway._depth = self._depth + 1
        if before:
            self._gateway.host = replace(self._gateway.host, jumps=tuple(before))
        return self._gateway.forward(self.host.address, self.host.port)

    def _check_host_key(self, transport: paramiko.Transport) -> None:
        key = transport.get_remote_server_key()
        check_host_key(self.host, key.get_name(), key.asbytes(), accept_new=self._accept_new)

    def _open_session(self) -> paramiko.Channel:
        transport = self.open()
        with self._bounded("open a channel"):
            return transport.open_session()

    def _close_channel(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(TasteError), self._bounded("close a channel"):
            channel.close()

    def _collect(
        self,
        channel: paramiko.Channel,
        arguments: tuple[str, ...],
        timeout: float,
        on_output: Callable[[bytes], None],
        messages: bytearray,
        output: bytearray | None = None,
    ) -> RunResult:
        """Both streams to their ends, then the exit code. A quiet program is fine, a quiet host is not."""
        quiet_s = self._answer_s * _QUIET_SHARE
        until = time.monotonic() + timeout
        while True:
            if channel.exit_status_ready() and _drained(channel):
                break
            left = until - time.monotonic()
            if left <= 0:
                raise LinkLostError(
                    f"{os.path.basename(arguments[0])} on {self.host} did not end within {timeout:.0f} s: stopped. "
                    "Use a smaller batch size, or see what else the board is doing."
                )
            if channel.eof_received:
                channel.status_event.wait(min(left, quiet_s))
            ready, _, _ = select.select([channel], [], [], min(left, quiet_s))
            got = _receive(channel, on_output, messages)
            if not got and (not ready or channel.eof_received) and not channel.exit_status_ready():
                self._ping()
        code = channel.recv_exit_status()
        if code < 0:
            # A signal, which paramiko does not pass on; or the end of the link, of which it may not know yet.
            try:
                self._ping()
            except LinkLostError as error:
                raise LinkLostError(
                    f"the link to {self.host} was cut while {arguments[0]} ran. Check the network and repeat."
                ) from error
        return RunResult(
            arguments,
            code if code >= 0 else 255,
            (output or b"").decode(errors="replace"),
            messages.decode(errors="replace"),
        )

    @property
    def open_now(self) -> bool:
        """Whether the link stands."""
        return self._transport is not None and self._transport.is_active()

    def _ping(self) -> None:
        """LinkLostError unless the server itself answers: TCP alone may stand long after it stopped."""
        transport = self.open() if self.open_now else None
        with self._bounded("answer"):
            if transport is None:
                raise EOFError
            transport.global_request("keepalive@openssh.com", wait=True)
            if not transport.is_active():
                raise EOFError

    @contextlib.contextmanager
    def _bounded(self, doing: str) -> Iterator[_Watch]:
        """Ends what is inside after a while without progress by closing the link; what is lost is a LinkLostError."""
        done = threading.Event()
        watch = _Watch(self._answer_s, done, self)
        watch.start()
        try:
            yield watch
        except (paramiko.AuthenticationException, paramiko.ssh_exception.IncompatiblePeer) as error:
            if watch.expired or not self.open_now and isinstance(error, paramiko.AuthenticationException):
                raise self._lost(doing, watch, error) from error
            raise
        except (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError) as error:
            if isinstance(error, OSError) and not watch.expired and self.open_now:
                raise
            raise self._lost(doing, watch, error) from error
        finally:
            done.set()
        if watch.expired:
            raise self._lost(doing, watch, None)

    def _lost(self, doing: str, watch: _Watch, error: BaseException | None) -> LinkLostError:
        if watch.expired:
            self.close()
            return LinkLostError(
                f"no answer from {self.host} for {self._answer_s:.0f} s to {doing}. Check that it is up."
            )
        said = " ".join(str(error).split()).rstrip(".") if error is not None else ""
        did = f"{self.host} refused to" if self.open_now else f"the link to {self.host} was closed when asked to"
        return LinkLostError(f"{did} {doing}: {said or 'no reason given'}. Check its sshd.")

    @contextlib.contextmanager
    def _file_calls(self, doing: str, path: str) -> Iterator[tuple[paramiko.SFTPClient, _Watch]]:
        """SFTP inside a watch. What the server refuses is a FileError or NoSpaceError, a lost link a LinkLostError."""
        files = self._open_files()
        with self._bounded(f"{doing} {path}") as watch:
            try:
                yield files, watch
            except OSError as error:
                # A link that was cut closes the channel first; what is closed says nothing of the file.
                channel = files.get_channel()
                gone = channel is None or channel.closed or channel.eof_received
                if watch.expired or gone or not self.open_now or isinstance(error, TimeoutError):
                    raise EOFError(str(error)) from error
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoSpaceError(f"no space left on {self.host} for {path}. Free some there.") from error
                said = error.strerror or str(error)
                raise FileError(f"cannot {doing} {path} on {self.host}: {said}. Check the folder there.") from error

    def _open_files(self) -> paramiko.SFTPClient:
        used = self._files.get_channel() if self._files is not None else None
        if self._files is not None and used is not None and not used.closed and self.open_now:
            return self._files
        channel = self._open_session()
        try:
            with self._bounded("open SFTP"):
                channel.invoke_subsystem("sftp")
                self._files = paramiko.SFTPClient(channel)
                return self._files
        except LinkLostError as error:
            if self.open_now and isinstance(error.__cause__, paramiko.SFTPError):
                raise CompatibilityError(
                    f"{self.host} answers SFTP with other text ({error.__cause__}): its login shell prints something. "
                    "Keep ~/.bashrc there silent."
                ) from error
            if self.open_now:
                raise MissingToolError(
                    f"{self.host} has no SFTP server. On Debian, there: apt-get install openssh-sftp-server."
                ) from error
            raise


def _receive(channel: paramiko.Channel, on_output: Callable[[bytes], None], messages: bytearray) -> bool:
    """Take what has arrived on both streams; whether there was anything."""
    before, got = len(messages), False
    while channel.recv_ready():
        got = True
        on_output(channel.recv(1 << 16))
    while channel.recv_stderr_ready():
        messages += channel.recv_stderr(1 << 16)
    return got or len(messages) > before


def _drained(channel: paramiko.Channel) -> bool:
    ended = channel.eof_received or channel.closed
    return bool(ended and not channel.recv_ready() and not channel.recv_stderr_ready())
