"""A systemd user unit with which a run goes on from its last checkpoint after the board was restarted.

DIR/runs/NAME/service.sh                           begins the run where it stood, in the foreground
~/.config/systemd/user/taste-edge-NAME.service     calls it at start-up, and again after a failure: at most 5 times in
                                                   10 minutes, and not after failures that another try cannot mend
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from cross.errors import INTERRUPTED, CompatibilityError, FileError, MissingToolError, UsageError
from host_control.boards.detached import EXIT, SERVICE, STOPPED, DetachedRun
from host_control.connection import Connection, put_text

MOST_FAILURES, WITHIN_S, PAUSE_S, SAVE_S = 5, 600, 10, 120
FINAL_CODES = (2, 13, 14, 15, 16, 19, 20)
"""Exit codes that another try cannot mend: usage, compatibility, corrupt input, a loss that is not finite, busy, refused."""

_CONTROL_SCRIPT = r"""
: "${XDG_RUNTIME_DIR:=/run/user/$(id -u)}"; export XDG_RUNTIME_DIR
"$@"
"""


@dataclass(frozen=True)
class Service:
    """`unit`: its name. `linger`: whether the user's services start with the board; else `remedy` says how they would."""

    unit: str
    linger: bool
    remedy: str


def unit_name(run: str) -> str:
    return f"taste-edge-{run}.service"


def service_script(run: DetachedRun, program: Sequence[str]) -> str:
    """What the unit calls. `program`: the words that began the run, without --run."""
    words = [*program, *([] if "--resume" in program else ["--resume"]), "--run", run.folder, "--foreground"]
    ended, stopped = (shlex.quote(run.path(name)) for name in (EXIT, STOPPED))
    return (
        "#!/bin/sh\n"
        "# Finished, or stopped on purpose: there is nothing to go on with.\n"
        f'[ "$(cat {ended} 2>/dev/null)" = 0 ] && exit 0\n'
        f"[ -e {stopped} ] && exit 0\n"
        f"exec {shlex.join(words)}\n"
    )


def unit_text(run: DetachedRun) -> str:
    """The unit of a run; UsageError where its folder cannot stand in one."""
    script = run.path(SERVICE)
    if any(not character.isprintable() for character in script):
        raise UsageError(f"the folder {run.folder!r} cannot stand in a unit. Pass a --remote-dir of plain letters.")
    plain = script.replace("%", "%%")
    quoted = plain.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f"""[Unit]
Description=taste-edge run {run.name}
ConditionPathExists={plain}
StartLimitIntervalSec={WITHIN_S}
StartLimitBurst={MOST_FAILURES}

[Service]
ExecStart=/bin/sh "{quoted}"
Restart=on-failure
RestartSec={PAUSE_S}
SuccessExitStatus={INTERRUPTED}
RestartPreventExitStatus={" ".join(map(str, FINAL_CODES))}
KillMode=mixed
TimeoutStopSec={SAVE_S}

[Install]
WantedBy=default.target
"""


def install_service(run: DetachedRun) -> Service:
    """Put script and unit on the board and enable the unit; it is not started, for the run may be under way.

    MissingToolError (22) where the board has no systemd, CompatibilityError (13) where it runs none for its users.
    """
    connection, program = run.connection, run.record().get("program")
    if not isinstance(program, list):
        raise UsageError(
            f"run {run.name} on {connection.name} does not say how it was begun. Begin it with this version."
        )
    folder = f"{connection.home()}/.config/systemd/user"
    _check_systemd(connection)
    made = connection.run(["mkdir", "-p", folder])
    if not made.ok:
        raise FileError(f"{connection.name}: {made.stderr.strip()}. Look at ~/.config there.")
    put_text(connection, service_script(run, program), run.path(SERVICE))
    put_text(connection, unit_text(run), f"{folder}/{unit_name(run.name)}")
    for words in (["daemon-reload"], ["enable", unit_name(run.name)]):
        done = control(connection, ["systemctl", "--user", *words])
        if not done[0]:
            raise CompatibilityError(f"{connection.name}: systemctl {words[0]} said: {done[1]}. Look at its journal.")
    linger, said = control(connection, ["loginctl", "enable-linger"])
    remedy = "" if linger else f"There: sudo loginctl enable-linger {run_user(connection)} ({said})"
    return Service(unit_name(run.name), linger, remedy)


def remove_service(run: DetachedRun) -> None:
    """Disable and remove a run's unit and its script, where it has one; the run itself is left alone."""
    connection, unit = run.connection, unit_name(run.name)
    if connection.size(run.path(SERVICE)) is None:
        return
    folder = f"{connection.home()}/.config/systemd/user"
    control(connection, ["systemctl", "--user", "disable", unit])
    leftover = f"{folder}/default.target.wants/{unit}"
    connection.run(["rm", "-f", f"{folder}/{unit}", leftover, run.path(SERVICE)])
    control(connection, ["systemctl", "--user", "daemon-reload"])


def control(connection: Connection, words: Sequence[str]) -> tuple[bool, str]:
    """Whether a command of systemd succeeded, and what it said; logins over SSH may lack the way to their manager."""
    result = connection.run(["sh", "-c", _CONTROL_SCRIPT, "taste-service", *words])
    return result.ok, " ".join((result.stderr or result.stdout).split()).rstrip(".") or f"exit code {result.exit_code}"


def run_user(connection: Connection) -> str:
    return connection.run(["id", "-un"]).stdout.strip() or "USER"


def _check_systemd(connection: Connection) -> None:
    if not connection.run(["sh", "-c", "command -v systemctl"]).ok:
        raise MissingToolError(f"{connection.name} has no systemd. Begin the run again by hand after a restart.")
    reached, said = control(connection, ["systemctl", "--user", "show-environment"])
    if not reached:
        raise CompatibilityError(
            f"{connection.name} runs no systemd for its users ({said}). On Debian, there: apt-get install dbus-user-session."
        )
