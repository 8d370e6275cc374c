"""A run after the fact, out of its journals: where its hours went, who and what cost them."""
