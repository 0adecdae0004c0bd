"""What an operator does with peers from outside: start, resize, inspect, export, tune."""
