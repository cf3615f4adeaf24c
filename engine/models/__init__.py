"""One small file a model family, over the layers of `engine.layers`."""
