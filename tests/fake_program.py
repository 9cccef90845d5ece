"""A shell script that stands in for taste-train: any executable file is deployed and started the same way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SCRIPT = r"""#!/bin/sh
# {text}
last=; run=
for word do [ "$last" = --run ] && run=$word; last=$word; done
if [ -n "$run" ] && [ -z "$DETACHED" ]; then
  # As native/taste-train/detached.c, without its lock.
  export DETACHED=1
  setsid sh -c '"$@" >>"$0/events.jsonl" 2>>"$0/messages" & echo $! >"$0/process"; wait $!; echo $? >"$0/exit"' \
    "$run" "$0" "$@" </dev/null >/dev/null 2>&1 &
  while [ ! -s "$run/process" ]; do sleep 0.02; done
  echo '{{"event":"started"}}'
  [ "$last" = --follow ] || exit 0
  while [ ! -s "$run/exit" ]; do sleep 0.02; done
  cat "$run/events.jsonl"; exit "$(cat "$run/exit")"
fi
case $1 in
info) echo '{{"event":"info","model":"fake","target":"x86-64-avx2"}}'; exit {info_exit} ;;
bench) ;;
*) echo "error: unknown verb $1. Use info or bench." >&2; exit 2 ;;
esac
echo "$*" >>"$0.calls"
echo '{{"event":"plan","batch_size":'"$3"',"planned_bytes":104857600}}'
case $3 in
  10) echo 'error: batch size 10 needs 812 MiB; 540 MiB free. Largest that fits: 8.' >&2; exit 10 ;;
  15) echo 'error: loss is NaN at step 3. Lower the learning rate.' >&2; exit 15 ;;
  77) exit 77 ;;
  132) kill -ILL $$ ;;
  137) kill -KILL $$ ;;
  139) kill -SEGV $$ ;;
  143) kill -TERM $$ ;;
  200) exit 0 ;;
  201) echo '{{"event":"result","batch_size":201}}'; exit 0 ;;
  300) echo $$ >"$0.pid"; while :; do sleep 0.1; done ;;
esac
echo 'not JSON, and no reason to fail'
echo '{{"event":"result","verb":"bench","batch_size":'"$3"',"samples_per_s":12.5,"spread":0.01,' \
  '"forward_s":0.1,"backward_s":0.2,"optimizer_s":0.01,"peak_rss_bytes":1000,"planned_bytes":1010,"page_faults":3,' \
  '"emulated":false,"tainted":true,"taint":"hot"}}'
"""


def write_build(folder: Path, text: str = "first", *, info_exit: int = 0, weights_bytes: int = 0) -> Path:
    """A build folder around the script; `text` makes its content, and so its hash, differ."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"taste-train": SCRIPT.format(text=text, info_exit=info_exit).encode()}
    if weights_bytes:
        files["weights.safetensors"] = (hashlib.sha256(text.encode()).digest() * (weights_bytes // 32 + 1))[
            :weights_bytes
        ]
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "taste-train").chmod(0o755)
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    manifest = {"format": 1, "target": "x86-64-avx2", "features": [], "vector_bits": 256, "files": listed, "text": text}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


FILES = ("taste-train", "manifest.json", "weights.safetensors")
"""What a deployment with weights sends."""
