"""Processes: workers and what they print, their end and its reason, and those that serve or outlive them."""
