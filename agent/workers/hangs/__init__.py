"""The search for hangs: signs of life of the workers, the limits of silence, and the suspicion that follows."""
