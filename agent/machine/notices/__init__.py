"""Notices that this machine goes away: of a cloud's metadata server, a file or a command."""
