"""The image of a board: Debian packages of its architecture, unpacked by mmdebstrap -> root disk, tree, kernel, keys.

    root.ext4    disk of a `-vm`             root.tar     the same tree, for a `-netns`
    vmlinuz      kernel of a `-vm`           initrd.gz    its modules for disk, network and cpufreq
    id, id.pub   who may log in              host.pub     the board's host key

Packages come from the mirror that this machine's apt uses, and are signed. The keys are the image's own: whoever can
read the folder may log in, and the boards answer on this machine only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from cross.errors import LinkLostError, NoSpaceError
from host_control.connection import tied_arguments
from host_control.emulation.boot_files import INIT, MODULES, make_boot_files
from host_control.emulation.debian_tree import APPLETS, PACKAGES, Keys, pack_overlay
from host_control.emulation.image_cache import cached, images_folder, remove_tree
from host_control.emulation.packages import TOOL_ENVIRONMENT, run_tool

Report = Callable[[str, int, int], None]

SUITE = "trixie"
DISK_BYTES = 2 << 30
_NEEDED_BYTES = 1200 << 20
_KERNELS = {"arm64": "linux-image-arm64", "riscv64": "linux-image-riscv64"}
_DEFAULT_MIRROR = "http://deb.debian.org/debian"
_STAGES = 4
_TOLD = ("update", "downloading", "extracting", "the tree", "the disk")

# Run by mmdebstrap with the tree as $1, before it cleans up: as root, or as fakeroot's root.
_HOOK = r"""
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
cd "$TASTE_PART/kernel"
latest=$(apt-cache depends "$TASTE_KERNEL" | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -n 1)
apt-get -qq download "${latest:-$TASTE_KERNEL}" >&2
tar -C "$1" --numeric-owner -xpf "$TASTE_PART/overlay.tar"
for applet in $TASTE_APPLETS; do
    [ -e "$1/usr/bin/$applet" ] || [ -e "$1/usr/sbin/$applet" ] || ln -s busybox "$1/usr/bin/$applet"
done
# Of systemd-sysv: without it, systemd is there as what others depend on, and starts nothing.
if [ -e "$1/usr/sbin/init" ]; then
    sed -i 's/^UsePAM no/UsePAM yes/' "$1/etc/ssh/sshd_config"
else
    ln -sf ../bin/busybox "$1/usr/sbin/init"
fi
# update-alternatives does this on a configured system.
for library in "$1"/usr/lib/*-linux-gnu/blas/libblas.so.3 "$1"/usr/lib/*-linux-gnu/lapack/liblapack.so.3; do
    [ ! -e "$library" ] || ln -sf "${library#"${library%/*/*}"/}" "${library%/*/*}/"
done
rm -rf "$1"/var/cache/apt "$1"/var/lib/apt/lists
cp "$1/usr/bin/busybox" "$TASTE_PART/busybox"
echo 'I: packing the tree' >&2
tar -C "$1" --sort=name --numeric-owner --exclude=./dev/'*' -cf "$TASTE_PART/root.tar" .
echo 'I: making the disk' >&2
truncate -s "$TASTE_DISK" "$TASTE_PART/root.ext4"
mke2fs -q -t ext4 -E lazy_itable_init=0 -d "$1" "$TASTE_PART/root.ext4"
"""


def find_image(architecture: str, packages: tuple[str, ...] = ()) -> Path:
    """Folder of the image of these inputs, whether it is there or not; its name is their hash."""
    recipe = [
        SUITE,
        architecture,
        _KERNELS[architecture],
        *PACKAGES,
        *sorted(packages),
        *APPLETS,
        _HOOK,
        str(DISK_BYTES),
    ]
    recipe += [pack_overlay(Keys("", "", "")).hex(), *MODULES, INIT]
    return images_folder() / f"{architecture}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]}"


def make_image(architecture: str, packages: tuple[str, ...], report: Report) -> Path:
    """The image, built where it is not in the cache; `packages` are Debian packages beside debian_tree.PACKAGES.

    Raises LinkLostError (17) with what mmdebstrap said, NoSpaceError (11) before anything is downloaded.
    """

    def build(part: Path) -> None:
        free = shutil.disk_usage(part).free
        if free < _NEEDED_BYTES:
            raise NoSpaceError(
                f"an image takes {_NEEDED_BYTES >> 20} MiB and {part.parent} has {free >> 20} free. "
                "Free some, or set TASTE_CACHE."
            )
        report("keys", 0, _STAGES)
        (part / "overlay.tar").write_bytes(pack_overlay(_make_keys(part)))
        (part / "kernel").mkdir()
        _run_mmdebstrap(architecture, packages, part, report)
        report("kernel", 3, _STAGES)
        version = _unpack_kernel(part)
        facts = {"suite": SUITE, "architecture": architecture, "kernel": version, "packages": [*PACKAGES, *packages]}
        (part / "image.json").write_text(json.dumps(facts, indent=2) + "\n")
        for left in ("overlay.tar", "busybox", "host"):
            (part / left).unlink()
        remove_tree(part / "kernel")
        remove_tree(part / "tmp")
        report("done", _STAGES, _STAGES)

    return cached(find_image(architecture, packages), build)


def _make_keys(part: Path) -> Keys:
    for name in ("id", "host"):
        run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "taste-edge board", "-f", part / name)
    texts = ((part / name).read_text() for name in ("id.pub", "host", "host.pub"))
    return Keys(*texts)


def _unpack_kernel(part: Path) -> str:
    package = next((part / "kernel").glob("*.deb"))
    run_tool("dpkg-deb", "-x", package, part / "kernel")
    return make_boot_files(part / "kernel", part / "busybox", part)


def _run_mmdebstrap(architecture: str, packages: tuple[str, ...], part: Path, report: Report) -> None:
    """Unpack the packages and run the hook; ended with this process, whatever ends it."""
    (part / "tmp").mkdir()
    root = os.geteuid() == 0
    command = [*([] if root else ["fakeroot"]), "mmdebstrap", f"--mode={'root' if root else 'chrootless'}"]
    command += [f"--arch={architecture}", "--variant=extract", f"--include={','.join([*PACKAGES, *packages])}"]
    # Nothing foreign is run and nothing mounted: whatever stops this leaves plain files.
    command += ["--skip=check/qemu,chroot/mount,output/dev", "--extract-hook", 'sh -c "$TASTE_HOOK" hook "$1"']
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    command += [SUITE, str(part / "tmp" / "root"), find_mirror()]
    environment = {
        **TOOL_ENVIRONMENT,
        "TMPDIR": str(part / "tmp"),
        "TASTE_PART": str(part),
        "TASTE_HOOK": _HOOK,
        "TASTE_KERNEL": _KERNELS[architecture],
        "TASTE_APPLETS": " ".join(APPLETS),
        "TASTE_DISK": str(DISK_BYTES),
    }
    with subprocess.Popen(
        tied_arguments(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        said = ["nothing"]
        try:
            for line in process.stderr:
                said = [*said[-20:], line.strip()]
                if line.startswith("I: ") and any(word in line for word in _TOLD):
                    report(line[3:].strip().rstrip("."), 2 if "the tree" in line or "the disk" in line else 1, _STAGES)
        finally:
            process.stdin.close()
            code = process.wait()
    if code != 0:
        errors = [line for line in said if line.startswith("E: ")] or said
        raise LinkLostError(
            f"mmdebstrap ended with exit code {code}: {errors[0]} Check the network and the mirror of apt, and repeat."
        )


def find_mirror() -> str:
    """The mirror that this machine's apt takes Debian from, or Debian's own."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return _DEFAULT_MIRROR
    return next((line.strip() for line in shown.splitlines() if line.strip().endswith("/debian/")), _DEFAULT_MIRROR)
