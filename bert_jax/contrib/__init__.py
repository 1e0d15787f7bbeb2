"""Optional rooms, each with its own commands, options and tests; the trunk imports none of them."""
