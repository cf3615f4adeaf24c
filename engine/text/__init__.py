"""Tokenizers and chat templates. No torch, no transformers at import time."""
