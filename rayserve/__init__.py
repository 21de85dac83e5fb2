"""Serve one very large language model on your own GPU hosts."""

__version__ = "0.1.0"
