"""This machine as it was found: devices, CPUs, interfaces, GPU memory, cgroups, installed versions."""
