"""`data fetch` against a server of our own that cuts, stalls, lies and goes away."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cross.errors import CorruptInputError, LinkLostError
from host_control.data import PackOptions, read_data_set
from host_control.data import fetch as fetching
from host_control.data.fetch import ARCHIVES, Archive, fetch
from tests import data_files as df


@dataclass
class _Server:
    """Serves `content` under any name; `cut` bytes at most an answer; `stall`: then silence."""

    port: int = 0
    content: bytes = b""
    cut: int | None = None
    stall: bool = False
    ranges: bool = True
    status: int = 200
    asked: list[str | None] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.asked.append(wanted)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        body = self.content[first:]
        handler.send_response(206 if first else self.status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cut])
        if self.stall:
            handler.wfile.flush()
            self.released.wait(30)
        handler.close_connection = True

    def archive(self, name: str = "a.tar.gz", folder: str | None = "top", content: bytes | None = None) -> Archive:
        right = self.content if content is None else content
        return Archive(f"http://127.0.0.1:{self.port}/{name}", len(right), hashlib.sha256(right).hexdigest(), folder)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = _Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        state.port = running.server_address[1]
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        state.released.set()
        running.shutdown()
        thread.join()


def _tar(files: dict[str, bytes], link: str | None = None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if link is not None:
            info = tarfile.TarInfo("top/link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    return packed.getvalue()


_X, _Y = df.random_images(6), [0, 1, 2, 0, 1, 2]
_CIFAR = _tar({f"top/{name}.bin": df.cifar10_records(_X, _Y) for name in ("data_batch_1", "test_batch")}, "/etc/passwd")


def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_fetched_is_a_data_set(server: _Server, tmp_path: Path) -> None:
    server.content = _CIFAR
    assert fetch((server.archive(),), tmp_path / "out") == len(_CIFAR)
    # The link in the archive is left out, the archive removed.
    assert _listed(tmp_path / "out") == ["top"] and _listed(tmp_path / "out" / "top") == [
        "data_batch_1.bin",
        "test_batch.bin",
    ]
    assert read_data_set(tmp_path / "out", PackOptions()).train.labels.tolist() == _Y
    assert fetch((server.archive(),), tmp_path / "out") == 0 and len(server.asked) == 1


def test_files_that_stay_as_they_are(server: _Server, tmp_path: Path) -> None:
    server.content = b"idx"
    fetch((server.archive("one.gz", None), server.archive("two.gz", None)), tmp_path)
    assert _listed(tmp_path) == ["one.gz", "two.gz"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_download_goes_on(server: _Server, ranges: bool, tmp_path: Path) -> None:
    server.content, server.ranges = _CIFAR, ranges
    half = len(_CIFAR) // 2
    server.cut = half
    with pytest.raises(LinkLostError, match=f"ended after {half} of {len(_CIFAR)} bytes.*Run it again"):
        fetch((server.archive(),), tmp_path)
    assert _listed(tmp_path) == ["a.tar.gz.part"]
    server.cut = None
    received = fetch((server.archive(),), tmp_path)
    assert server.asked == [None, f"bytes={half}-"] and received == len(_CIFAR) - (half if ranges else 0)
    assert _listed(tmp_path) == ["top"]


def test_silence_is_bounded(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_ANSWER_S", 0.2)
    server.content, server.cut, server.stall = _CIFAR, 100, True
    with pytest.raises(LinkLostError, match="cannot be fetched"):
        fetch((server.archive(),), tmp_path)


def test_a_trickle_is_bounded(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_DEADLINE_S", 0.0)
    server.content = _CIFAR
    with pytest.raises(LinkLostError, match="came within 0 s"):
        fetch((server.archive(),), tmp_path)


def test_no_server_and_no_such_file(server: _Server, tmp_path: Path) -> None:
    server.content, server.status = b"<h1>404</h1>", 404
    with pytest.raises(LinkLostError, match="Not Found.*by hand"):
        fetch((server.archive(),), tmp_path)
    with pytest.raises(LinkLostError, match="refused") as caught:
        fetch((Archive("http://127.0.0.1:9/a.gz", 1, "", None),), tmp_path)
    assert caught.value.exit_code == 17


@pytest.mark.parametrize("extra", [0, 5])
def test_other_contents_are_refused_and_removed(server: _Server, extra: int, tmp_path: Path) -> None:
    server.content = bytes(len(_CIFAR) + extra)
    with pytest.raises(CorruptInputError, match="SHA-256"):
        fetch((server.archive(content=_CIFAR),), tmp_path)
    assert _listed(tmp_path) == []


def test_an_archive_brought_by_hand_is_used(server: _Server, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(_CIFAR)
    assert fetch((server.archive(content=_CIFAR),), tmp_path) == 0
    assert _listed(tmp_path) == ["top"] and not server.asked


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil-of-fetch", "top/../../evil", "top/..\\evil"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_paths_that_lead_out_are_refused(server: _Server, name: str, kind: str, tmp_path: Path) -> None:
    out, files = tmp_path / "out", {"top/good": b"1", name: b"2"}
    server.content = _tar(files) if kind == "tar" else df.write_zip(tmp_path / "a.zip", files).read_bytes()
    with pytest.raises(CorruptInputError, match="leads out of it"):
        fetch((server.archive("a.zip" if kind == "zip" else "a.tar.gz"),), out)
    assert _listed(out) == ["a.zip" if kind == "zip" else "a.tar.gz"] and not (tmp_path / "evil").exists()


def test_an_archive_that_swells_is_refused(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_MAX_UNPACKED_BYTES", 10**6)
    server.content = _tar({"top/zeros": bytes(2 * 10**6)})
    with pytest.raises(CorruptInputError, match="unpacks to more than 1000000 bytes"):
        fetch((server.archive(),), tmp_path)
    assert _listed(tmp_path) == ["a.tar.gz"]


def test_the_known_archives_have_checksums() -> None:
    for archives in ARCHIVES.values():
        for archive in archives:
            assert len(bytes.fromhex(archive.sha256)) == 32 and archive.bytes > 5000 and "://" in archive.url
