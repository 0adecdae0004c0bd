"""What needs a container engine, or devices that boot: `make test-compose`. A test that skips says what is missing."""
