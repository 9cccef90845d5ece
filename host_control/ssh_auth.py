"""Proving to a host who we are: agent, key files, then a password from a prompt or TASTE_SSH_PASSWORD."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob

from cross.errors import AuthenticationError, LinkLostError
from host_control.ssh_host import SshHost

PASSWORD_VARIABLE = "TASTE_SSH_PASSWORD"
_PROMPTS = 3
_AGENT_S = 10.0

Ask = Callable[[str], str | None]
"""Asks for a secret; None where nobody is there to answer."""


class Watch(Protocol):
    """Says afterwards whether the time ran out."""

    expired: bool


Bounded = Callable[[str], AbstractContextManager[Watch]]
"""`with bounded("log in"):` ends whatever is inside after a while (host_control.ssh)."""


def ask_terminal(prompt: str) -> str | None:
    """Ask at the terminal, without echo; None where stdin is no terminal."""
    return getpass.getpass(prompt) if sys.stdin is not None and sys.stdin.isatty() else None


class Remembered:
    """Asks a secret once: what let us in is given again when the link is opened anew, as after a cut."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._given: dict[str, str] = {}
        self._ready: dict[str, str] = {}

    def __call__(self, prompt: str) -> str | None:
        if prompt in self._ready:
            return self._ready.pop(prompt)
        answer = self._ask(prompt)
        if answer:
            self._given[prompt] = answer
        return answer

    def keep(self) -> None:
        """The last answers were right."""
        self._ready = dict(self._given)


def authenticate(transport: paramiko.Transport, host: SshHost, bounded: Bounded, ask: Ask) -> None:
    """Log in; AuthenticationError (21) says what was tried. Only the network is bounded, not a person at a prompt."""
    login = _Login(transport, host, bounded, ask)
    if not login.finished:
        with contextlib.ExitStack() as agents:
            login.try_keys(agents)
    if not login.finished:
        login.try_passwords()
    if not login.finished:
        raise login.refused()


class _Login:
    """What was tried so far, and what the host still accepts."""

    def __init__(self, transport: paramiko.Transport, host: SshHost, bounded: Bounded, ask: Ask) -> None:
        self._transport, self._host, self._bounded, self._ask = transport, host, bounded, ask
        self._tried: list[str] = []
        self.methods: list[str] = []
        self.finished = False
        self._attempt(None, lambda: transport.auth_none(host.user))

    def try_keys(self, agents: contextlib.ExitStack) -> None:
        for label, key in self._keys(agents):
            if self.finished or "publickey" not in self.methods:
                return
            self._attempt(label, lambda key=key: self._transport.auth_publickey(self._host.user, key))  # type: ignore[misc]

    def try_passwords(self) -> None:
        if not {"password", "keyboard-interactive"} & set(self.methods):
            return
        for number, password in enumerate(self._passwords()):
            label = "password" if number == 0 else f"password ({number + 1})"
            self._attempt(label, lambda word=password: self._transport.auth_password(self._host.user, word))  # type: ignore[misc]
            if self.finished:
                return

    def refused(self, reason: str = "") -> AuthenticationError:
        user, host = self._host.user, self._host
        tried = ", ".join(self._tried) or "nothing: there is no agent, no readable key file and no password"
        accepts = f"; the host accepts {', '.join(self.methods)}" if self.methods else ""
        return AuthenticationError(
            f"{host} refused user {user} ({reason}tried {tried}{accepts}). "
            f"Add a key with `ssh-copy-id {user}@{host.address}`, or set {PASSWORD_VARIABLE}."
        )

    def _attempt(self, label: str | None, step: Callable[[], object]) -> None:
        """One try; what the host still accepts afterwards is in `methods`."""
        if label:
            self._tried.append(label)
        watch = None
        try:
            with self._bounded("log in") as watch:
                left = step()
        except paramiko.BadAuthenticationType as error:
            self.methods = list(error.allowed_types)
        except paramiko.AuthenticationException:
            pass  # This try was refused; the next may not be.
        except LinkLostError as error:
            # A host that hangs up in answer to a try has had enough of us: it is there, and it refused.
            if self._tried and watch is not None and not watch.expired:
                raise self.refused("the host closed the link, as after too many tries; ") from error
            raise
        else:
            self.methods = list(left) if isinstance(left, list) else []
            self.finished = self._transport.is_authenticated()

    def _keys(self, agents: contextlib.ExitStack) -> Iterator[tuple[str, paramiko.PKey]]:
        """Agent keys that the configuration names, other agent keys, then key files; the encrypted ones come last."""
        files = [path for path in self._host.identity_files if path.is_file()]
        public = {blob for path in files if (blob := _public_blob(path))}
        held = agents.enter_context(open_agent(self._host.agent)) if self._host.agent else []
        named = [key for key in held if key.asbytes() in public]
        others = [] if self._host.identities_only else [key for key in held if key.asbytes() not in public]
        for key in (*named, *others):
            yield f"agent key {key.comment or key.get_name()}", key
        in_agent = {key.asbytes() for key in held}
        locked = []
        for path in files:
            if _public_blob(path) in in_agent:
                continue
            try:
                yield str(path), load_key(path)
            except paramiko.PasswordRequiredException:
                locked.append(path)
            except (paramiko.SSHException, OSError, ValueError):
                self._tried.append(f"{path} (not readable as a key)")
        for path in locked:
            opened = self._unlock(path)
            if opened is None:
                self._tried.append(f"{path} (encrypted, not opened)")
            else:
                yield str(path), opened

    def _unlock(self, path: Path) -> paramiko.PKey | None:
        for _ in range(_PROMPTS):
            phrase = self._ask(f"passphrase of {path}: ")
            if not phrase:
                return None
            try:
                return load_key(path, phrase)
            except (paramiko.SSHException, ValueError):
                continue
        return None

    def _passwords(self) -> Iterator[str]:
        if from_environment := os.environ.get(PASSWORD_VARIABLE):
            yield from_environment
            return
        for _ in range(_PROMPTS):
            password = self._ask(f"password of {self._host.user}@{self._host.address}: ")
            if not password:
                return
            yield password


class _Agent(AgentSSH):
    """An agent at a socket of our choice."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__()
        self._connect(link)  # type: ignore[attr-defined]


@contextlib.contextmanager
def open_agent(path: str) -> Iterator[list[AgentKey]]:
    """The keys that the agent at `path` holds, of use while it is open; none where no agent answers there in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_AGENT_S)
        try:
            link.connect(path)
            keys = list(_Agent(link).get_keys())
        except (OSError, paramiko.SSHException):
            keys = []
        yield keys


def load_key(path: Path, passphrase: str | None = None) -> paramiko.PKey:
    """A private key file; PasswordRequiredException where it is encrypted, SSHException where it is no key."""
    kinds: tuple[type[paramiko.PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)
    last: Exception = paramiko.SSHException(f"{path} is no private key")
    for kind in kinds:
        try:
            return kind.from_private_key_file(str(path), passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError, IndexError) as error:
            last = error
    raise last


def _public_blob(path: Path) -> bytes | None:
    """The public half that ssh-keygen leaves beside a private key, if it is there."""
    try:
        return PublicBlob.from_file(f"{path}.pub").key_blob
    except (OSError, ValueError, IndexError):
        return None
