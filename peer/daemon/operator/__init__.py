"""What the daemon answers to its operator, exports and writes down for an audit."""
