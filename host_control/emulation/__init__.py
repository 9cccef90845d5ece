"""Emulated boards: a board's own Debian under QEMU, with its own SSH server. They prove results, never speed.

    board up rpi4-vm        catalogue -> packages -> root_image (debian_tree, boot_files) -> virtual_machine (device_tree) -> state
    board up rpi4-netns     catalogue -> packages -> root_image -> namespace_board -> state
    --board rpi4-vm         state -> an ssh_config -> host_control.boards.ssh

A `-vm` is a QEMU machine with a kernel, and needs no rights; a `-netns` is the same Debian tree in namespaces of this
kernel, its programs under qemu-user by binfmt_misc, which starts in a second and needs root.
"""
