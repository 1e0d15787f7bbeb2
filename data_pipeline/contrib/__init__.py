"""Optional rooms of text preparation; the trunk imports none of them."""
