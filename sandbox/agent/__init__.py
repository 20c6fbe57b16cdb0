"""The agent: PID 1 of a sandbox. Standard library only, Python 3.9 or later, imports nothing outside this folder.

It listens on an inherited or mounted unix socket, runs tool calls, keeps a journal of them by key in memory that no
tool can read, and outlives the controller that started it. It is copied into every image and started there as
`python3 -I -S -B -c BOOT tenuto-agent HOME SANDBOX`, so a reaper knows it by its command line.
"""
