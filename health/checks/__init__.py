"""Pre-flight checks: is this machine fit to train? One function looks at one thing, and a finding says what it saw."""
