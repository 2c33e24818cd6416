"""Policies, and the formats in which they read and write.

Modules that need torch (`local`, `ragged`, `checkpoint`) are imported by name, so that layers above can do without it.
"""
