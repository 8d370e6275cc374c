"""Stands for torch in agents and store holders of tests: see `distributed`."""
