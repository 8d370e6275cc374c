"""What the workers of this node do, kept before anything is killed: taken from outside, judged by pure functions."""
