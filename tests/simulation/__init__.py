"""The whole cluster in one process under a virtual clock: real nodes, clients and managers on a simulated network."""
