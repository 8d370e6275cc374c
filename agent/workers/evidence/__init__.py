"""Evidence of what the workers of this node do, collected from outside before they are killed, and judged."""
