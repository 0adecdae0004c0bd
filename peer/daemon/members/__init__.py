"""Who takes part: the list of peers, joining, leaving, losses and what signs them."""
