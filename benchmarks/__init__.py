"""Every speed claim has a command here. `make bench` runs those that need nothing else."""
