"""Membership: the list of peers, joining, leaving, losses and the signatures under them."""
