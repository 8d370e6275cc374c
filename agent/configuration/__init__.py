"""From words on the command line, in the environment and in a file to one checked `Config`."""
