"""The paper, made from the results and from nothing else: see `build`."""
