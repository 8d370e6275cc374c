"""`elastic-agent status`: the pages that an agent serves, and the command that asks for them."""
