"""What the pages show: a module for each page, a function for each marker.

A function with `@on(N)` runs on N ranks. `run` shows its lines and what they print; a function with
`@drawn_from(f)` gets the list of what `f` returned on each rank and returns text.
"""
