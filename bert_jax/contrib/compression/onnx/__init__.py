"""Exported programs in 8 bits: ranges of their products, and their scores on labeled examples."""
