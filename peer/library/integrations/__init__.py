"""`sottovoce.join` where a framework has the training loop. Each module imports its framework, so that nothing imports
one unless a script does. Knows the frameworks' public hooks, and nothing of how a peer exchanges."""
