"""The layers models are built of. Parameters are made on the meta device and filled by `engine.loader`."""
