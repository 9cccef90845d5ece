"""A plugin of pytest, `-p tests.planted_calendar`: host_control.ssh bounds its waits by the calendar."""

import time
from types import SimpleNamespace

from host_control import ssh

vars(ssh)["time"] = SimpleNamespace(monotonic=time.time, sleep=time.sleep)
