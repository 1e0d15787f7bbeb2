"""Rooms beside the trunk of text preparation, which imports none of them."""
