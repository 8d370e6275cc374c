"""What reads facts from this machine. Each function may hang or crash: it runs in a process of its own."""
