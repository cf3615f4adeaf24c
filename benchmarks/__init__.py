"""Every speed claim has a command here. `make bench` runs all of them."""
