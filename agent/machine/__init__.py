"""This machine as it was found: devices, CPUs, interfaces, GPU memory, installed versions."""
