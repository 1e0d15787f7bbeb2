"""Rooms beside the trunk, which imports none of them; each has its commands, options and tests."""
