"""Token ids to text: the streaming detokenizer and stop strings."""
