"""Processes: workers, their end and its reason, and those that serve or outlive them."""
