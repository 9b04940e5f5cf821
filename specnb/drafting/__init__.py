"""Drafters: each proposes tokens together with the distribution that it sampled them from. One
kind a file."""
