"""Every speed claim has a command here. `make bench` runs those of engine and service."""
