"""Workers that seem to hang: what shows it, after how long it counts, and what is asked of them then."""
