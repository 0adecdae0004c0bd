"""Real peers over shaped links, in network namespaces."""
