"""The Ray Serve side: HTTP, ingress, engine actors, manager."""
