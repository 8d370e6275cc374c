"""The page for people at `/`: what it is made of, and what it is sent while somebody looks at it."""
