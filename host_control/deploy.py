"""Sending a build to a board so that an interruption leaves the old deployment or the new one, never a mixture.

    DIR/objects/<sha256>/NAME     files by content; sent as NAME.part, hashed on the board, synced, renamed
    DIR/deployments/<id>/NAME     links to the objects of one build, for Python device_runtime/NAME too; made beside
                                  and renamed as a whole
    DIR/current                   link to the deployment in use; switched by one rename
    DIR/previous                  link to the one before, for `rollback`
    DIR/data/<sha256>/NAME        data sets and weights by content, kept until `board clean`
    DIR/runs/<run>/               what a training run leaves there: checkpoints, weights

What is there already is not sent again, a part left by a cut is resumed where its hash fits, and the deployment before
the current one is kept. DIR is ~/.local/share/taste-edge unless said otherwise.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cross.errors import CorruptInputError, FileError, NoSpaceError, TasteError, UsageError
from host_control.connection import Connection, RunResult, shell_line

PROGRAM, LIBRARY = "taste-train", "libtaste.so"
_PACKAGE = Path(__file__).resolve().parent.parent / "device_runtime"
PROGRAM_FILES = (PROGRAM, "manifest.json")
PYTHON_FILES = (
    *(*PROGRAM_FILES, LIBRARY, "weights.safetensors"),
    *(f"{_PACKAGE.name}/{path.name}" for path in sorted(_PACKAGE.glob("*.py"))),
)
"""What a deployment holds, and what one holds that Python on the board can use: the package too, which is no part of a build."""
DEFAULT_FOLDER = "~/.local/share/taste-edge"

_OURS = ("current", "current.part", "previous", "previous.part", "data", "deployments", "objects", "runs")
_EXECUTABLE = (PROGRAM, LIBRARY)
_BLOCK_BYTES = 1 << 20
_MARGIN_BYTES = 1 << 20
_SLOW_S = 120.0
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


@dataclass(frozen=True)
class Deployment:
    """One build on a board: its folder there, `id` of its files, `sha256` of the program, what had to be sent."""

    folder: str
    id: str
    sha256: str
    sent_bytes: int

    def path(self, name: str) -> str:
        """Where a file of this deployment lies on the board."""
        return f"{self.folder}/deployments/{self.id}/{name}"


def resolve_folder(connection: Connection, remote_dir: str) -> str:
    """The absolute path of `remote_dir` on the board; `~/` and relative paths start at the user's home there."""
    if not remote_dir or "\0" in remote_dir:
        raise UsageError(
            f"remote folder {remote_dir!r} is not a path. Give --remote-dir an absolute path, or ~/FOLDER."
        )
    if posixpath.isabs(remote_dir):
        return posixpath.normpath(remote_dir)
    return posixpath.normpath(posixpath.join(connection.home(), remote_dir.removeprefix("~/")))


def upload(connection: Connection, build_dir: Path, folder: str, names: Sequence[str]) -> Deployment:
    """Put the files `names` of a build on the board, verified by SHA-256, without making them current.

    Where the current deployment holds them all, among others, it is that one.
    """
    sources = {name: _source(build_dir, name) for name in names}
    hashes = _hash_build(build_dir, sources)
    objects = {name: _object(folder, digest, name) for name, digest in hashes.items()}
    present = [name for name, path in objects.items() if connection.size(path) == sources[name].stat().st_size]
    read = _board_sha256(connection, [objects[name] for name in present])
    absent = [name for name in objects if read.get(objects[name]) != hashes[name]]
    if absent:
        _command(connection, ["mkdir", "-p", *(posixpath.dirname(objects[name]) for name in absent)])
        _check_space(connection, folder, sum(sources[name].stat().st_size for name in absent))
    try:
        sent = sum(_send(connection, sources[name], f"{objects[name]}.part") for name in absent)
    except (FileError, NoSpaceError):
        # A full disk should not stay full because of us. After a cut the parts stay, and are resumed.
        connection.run(["rm", "-f", *(f"{objects[name]}.part" for name in absent)])
        raise
    _settle(connection, {objects[name]: hashes[name] for name in absent})
    listing = "".join(f"{digest} {name}\n" for name, digest in sorted(hashes.items()))
    deployment = Deployment(folder, hashlib.sha256(listing.encode()).hexdigest()[:16], hashes[PROGRAM], sent)
    if (current := _current_with(connection, folder, hashes)) is not None:
        return replace(deployment, id=current)
    _link_objects(connection, deployment, hashes)
    return deployment


def activate(connection: Connection, deployment: Deployment) -> None:
    """Make a deployment the current one by one rename, then drop all but it and the one before."""
    folder, target = deployment.folder, f"deployments/{deployment.id}"
    before = connection.read_link(f"{folder}/current")
    if before == target:
        return
    if before is not None:
        _point(connection, folder, "previous", before)
    _point(connection, folder, "current", target)
    _steps(connection, _sync(folder))
    _prune(connection, folder, {deployment.id, posixpath.basename(before or "")})


def find_previous(connection: Connection, folder: str) -> str:
    """The id of the deployment before the current one; UsageError where there is none to go back to."""
    current, previous = (connection.read_link(f"{folder}/{name}") for name in ("current", "previous"))
    if current is None:
        raise UsageError(f"nothing is deployed on {connection.name} in {folder}. Deploy a build first.")
    kept = connection.names(f"{folder}/deployments")
    others = [name for name in kept if name != posixpath.basename(current) and not name.endswith(".part")]
    before = posixpath.basename(previous or "")
    if before in others:
        return before
    # A cut between the two links of a switch leaves both at the same deployment; the other one is still kept.
    if len(others) != 1:
        raise UsageError(f"{connection.name} has no deployment before the current one. Deploy the build you want.")
    return others[0]


def roll_back(connection: Connection, folder: str, previous: str) -> None:
    """Make the deployment `previous` current again by one rename; the one in use until now becomes the one before."""
    current = connection.read_link(f"{folder}/current")
    _point(connection, folder, "current", f"deployments/{previous}")
    if current is not None:
        _point(connection, folder, "previous", current)
    _steps(connection, _sync(folder))


def _point(connection: Connection, folder: str, name: str, target: str) -> None:
    """Let the link `name` lead to `target`, by one rename."""
    part = f"{folder}/{name}.part"
    try:
        connection.link(target, part)
    except FileError:
        # What an interrupted switch has left.
        _command(connection, ["rm", "-rf", part])
        connection.link(target, part)
    connection.rename(part, f"{folder}/{name}")


def upload_file(connection: Connection, source: Path, folder: str) -> tuple[str, int]:
    """Put one file on the board under its content's hash; its path there, and the bytes sent (0: it was there).

    Sent, hashed there, synced and renamed as a build is; NoSpaceError (11) with the numbers before anything is sent.
    """
    digest, size = _sha256(source), source.stat().st_size
    path = f"{folder}/data/{digest}/{source.name}"
    if connection.size(path) == size:
        return path, 0
    _command(connection, ["mkdir", "-p", posixpath.dirname(path)])
    _check_space(connection, folder, size - min(size, connection.size(f"{path}.part") or 0), source.name)
    try:
        sent = _send(connection, source, f"{path}.part")
    except (FileError, NoSpaceError):
        connection.run(["rm", "-f", f"{path}.part"])
        raise
    _settle(connection, {path: digest})
    return path, sent


def remove_all(connection: Connection, folder: str) -> list[str]:
    """Remove everything of ours in `folder`, and the folder if nothing else is in it; the names that stay."""
    _command(connection, ["rm", "-rf", *(f"{folder}/{name}" for name in _OURS)], timeout=_SLOW_S)
    left = connection.names(folder)
    if not left:
        connection.run(["rmdir", folder])
    return left


def check_executable(connection: Connection, program: str, result: RunResult) -> None:
    """FileError (12) with the remedy where `program` did not start because its file system is mounted noexec."""
    if result.exit_code != _NOT_EXECUTABLE:
        return
    resolved = connection.run(["readlink", "-f", program]).stdout.rstrip("\n") or program
    mounts = connection.run(["cat", "/proc/mounts"]).stdout
    point, options = mount_of(resolved, mounts)
    if "noexec" in options:
        raise FileError(
            f"{resolved} cannot be executed on {connection.name}: {point} is mounted noexec. "
            f"Pass --remote-dir on another file system, or there: sudo mount -o remount,exec {point}"
        )


def _source(build_dir: Path, name: str) -> Path:
    """Where a file of a deployment lies here."""
    return (_PACKAGE.parent if name.startswith(f"{_PACKAGE.name}/") else build_dir) / name


def _object(folder: str, digest: str, name: str) -> str:
    return f"{folder}/objects/{digest}/{posixpath.basename(name)}"


def _hash_build(build_dir: Path, sources: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each file; CorruptInputError where a file is not the one that the manifest speaks of."""
    hashes = {}
    for name, path in sources.items():
        if not path.is_file():
            raise UsageError(f"{build_dir} holds no {name}: not a build. Run `build --out {build_dir}` first.")
        hashes[name] = _sha256(path)
    manifest = build_dir / "manifest.json"
    listed = json.loads(manifest.read_text(encoding="utf-8")).get("files", {}) if manifest.is_file() else {}
    for name, digest in hashes.items():
        expected = listed.get(name, {}).get("sha256", digest)
        if expected != digest:
            raise CorruptInputError(
                f"{build_dir / name} has SHA-256 {digest[:16]}..., its manifest says {expected[:16]}... Build again."
            )
    return hashes


def _sha256(path: Path, length: int | None = None) -> str:
    """Of a whole file here, or of its first `length` bytes."""
    digest, left = hashlib.sha256(), path.stat().st_size if length is None else length
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _board_sha256(connection: Connection, paths: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files as the board reads them; fetched and hashed here where the board has no such tool."""
    if not paths:
        return {}
    for tool in (["sha256sum"], ["busybox", "sha256sum"]):
        result = connection.run([*tool, *paths], timeout=_SLOW_S)
        # Names with a backslash or a newline are escaped, which their line announces by a backslash in front.
        digests = re.findall(r"^\\?([0-9a-f]{64}) ", result.stdout, re.MULTILINE)
        if result.ok and len(digests) == len(paths):
            return dict(zip(paths, digests, strict=True))
    with tempfile.TemporaryDirectory(prefix="taste-") as folder:
        copies = {path: Path(folder) / str(number) for number, path in enumerate(paths)}
        for path, copy in copies.items():
            connection.get(path, copy)
        return {path: _sha256(copy) for path, copy in copies.items()}


def _send(connection: Connection, source: Path, part: str) -> int:
    """Send one file as `part`, on from what an earlier try left there; the bytes that crossed the link."""
    total, offset = source.stat().st_size, connection.size(part) or 0
    if offset > total or (offset and _board_sha256(connection, [part])[part] != _sha256(source, offset)):
        offset = 0
    try:
        return connection.put(source, part, offset=offset)
    except (FileError, NoSpaceError) as error:
        raise _full_disk(connection, part, total, error) from error


def _settle(connection: Connection, objects: Mapping[str, str]) -> None:
    """Give files that arrived as parts their final names: checked, on the disk, then renamed, then the renames too."""
    if not objects:
        return
    parts = {path: f"{path}.part" for path in objects}
    arrived = _board_sha256(connection, list(parts.values()))
    for path, part in parts.items():
        if arrived[part] != objects[path]:
            _command(connection, ["rm", "-f", *parts.values()])
            raise FileError(
                f"{posixpath.basename(path)} arrived on {connection.name} with SHA-256 {arrived[part][:16]}..., not "
                f"{objects[path][:16]}... Deploy again; if it stays, check the board's storage."
            )
    modes = {path: "755" if posixpath.basename(path) in _EXECUTABLE else "644" for path in parts}
    _steps(
        connection,
        *(shell_line(["chmod", modes[path], part]) for path, part in parts.items()),
        _sync(*parts.values()),
        *(shell_line(["mv", "-f", part, path]) for path, part in parts.items()),
        _sync(*map(posixpath.dirname, objects)),
    )


def _full_disk(connection: Connection, part: str, total: int, error: TasteError) -> TasteError:
    """What a failed write was: SFTP says `failure` of a full disk as of anything else."""
    folder = posixpath.dirname(part)
    written, free = connection.size(part) or 0, _free_bytes(connection, folder)
    if isinstance(error, NoSpaceError) or (free is not None and free < total - written):
        return NoSpaceError(
            f"{connection.name} has no space left in {folder}: {_mib(total)} to write, full after {_mib(written)}. "
            "Free some, run `board clean`, or pass --remote-dir."
        )
    return error


def _check_space(connection: Connection, folder: str, needed: int, what: str = "the build") -> None:
    free = _free_bytes(connection, folder)
    if needed and free is not None and free < needed + _MARGIN_BYTES:
        raise NoSpaceError(
            f"{connection.name} has {_mib(free)} free in {folder}, {what} needs {_mib(needed + _MARGIN_BYTES)}. "
            "Free some, run `board clean`, or pass --remote-dir."
        )


def _free_bytes(connection: Connection, folder: str) -> int | None:
    """What an ordinary user may still write there, or None where `df` does not say."""
    match = re.search(r"\s(\d+)\s+\d+%\s+/", connection.run(["df", "-Pk", folder]).stdout)
    return int(match.group(1)) * 1024 if match else None


def _link_objects(connection: Connection, deployment: Deployment, hashes: Mapping[str, str]) -> None:
    final = f"{deployment.folder}/deployments/{deployment.id}"
    if connection.names(final) == sorted({name.partition("/")[0] for name in hashes}):
        return
    targets = {f"{final}.part/{name}": _target(digest, name) for name, digest in hashes.items()}
    _steps(
        connection,
        shell_line(["rm", "-rf", f"{final}.part", final]),
        shell_line(["mkdir", "-p", *sorted(set(map(posixpath.dirname, targets)))]),
        *(shell_line(["ln", "-s", target, path]) for path, target in targets.items()),
        shell_line(["mv", f"{final}.part", final]),
        _sync(posixpath.dirname(final)),
    )


def _target(digest: str, name: str) -> str:
    """What the link of a file in a deployment holds."""
    return _object("../" * name.count("/") + "../..", digest, name)


def _current_with(connection: Connection, folder: str, hashes: Mapping[str, str]) -> str | None:
    """The id of the current deployment, where all these files are in it."""
    current = connection.read_link(f"{folder}/current")
    held = current is not None and all(
        connection.read_link(f"{folder}/{current}/{name}") == _target(digest, name) for name, digest in hashes.items()
    )
    return posixpath.basename(current) if current is not None and held else None


def _linked(connection: Connection, folder: str) -> set[str]:
    """The digests of the files that a deployment links to, those of a package in it too."""
    found = set()
    for name in connection.names(folder):
        link = connection.read_link(f"{folder}/{name}")
        if link is not None:
            found.add(posixpath.basename(posixpath.dirname(link)))
        elif name == _PACKAGE.name:
            found |= _linked(connection, f"{folder}/{name}")
    return found


def _prune(connection: Connection, folder: str, kept: set[str]) -> None:
    deployments = f"{folder}/deployments"
    surplus = [f"{deployments}/{name}" for name in connection.names(deployments) if name not in kept]
    used = set[str]().union(*(_linked(connection, f"{deployments}/{deployment}") for deployment in kept - {""}))
    surplus += [f"{folder}/objects/{name}" for name in connection.names(f"{folder}/objects") if name not in used]
    if surplus:
        _command(connection, ["rm", "-rf", *surplus], timeout=_SLOW_S)


def _steps(connection: Connection, *lines: str) -> None:
    """Lines of a shell, one after the other up to the first that fails, in one command: each costs the link's time, and
    on a slow board a login shell's."""
    _command(connection, ["sh", "-c", " && ".join(lines)], timeout=_SLOW_S)


def _sync(*paths: str) -> str:
    """The line that writes `paths` to the disk; a `sync` that knows no paths syncs everything, and where there is none
    nothing can be done."""
    return f"{{ {shell_line(['sync', *paths])} || [ $? -eq {_NOT_FOUND} ]; }}"


def _command(connection: Connection, arguments: Sequence[str], *, timeout: float | None = None) -> None:
    """A small POSIX command that must succeed; its messages in English so that a full disk is recognised."""
    words = ["env", "LC_ALL=C", *arguments]
    result = connection.run(words, timeout=timeout)
    if result.ok:
        return
    said = " ".join(result.stderr.split()).rstrip(".") or f"exit code {result.exit_code}"
    if "No space left" in said or "quota exceeded" in said:
        raise NoSpaceError(f"{connection.name} has no space left: {said}. Free some, or pass --remote-dir.")
    raise FileError(f"{connection.name}: {said}. Pass a --remote-dir that can be written.")


def mount_of(path: str, mounts: str) -> tuple[str, tuple[str, ...]]:
    """Mount point and options of the file system that holds `path`, from the text of /proc/mounts."""
    best, options = "", tuple[str, ...]()
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[1])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, options = point, tuple(fields[3].split(","))
    return best, options


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
