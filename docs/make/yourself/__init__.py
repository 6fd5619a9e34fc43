"""Functions of the engine to write oneself, and their check: `python -m docs.make.yourself`."""
