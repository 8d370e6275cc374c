"""The workers of this node: started, watched, stopped and judged, one generation at a time."""
