"""The network that the job uses: this machine's interfaces and addresses, and which one is chosen."""
