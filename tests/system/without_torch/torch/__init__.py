"""Stands for torch in agents and store servers of tests: see `distributed`."""
