"""Answers to the operator, exports, and records for an audit."""
