"""The store of one machine: hosted by one of its agents in a folder of its user's own, reached over a UNIX socket."""
