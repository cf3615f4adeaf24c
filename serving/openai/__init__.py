"""The OpenAI HTTP surface: requests, responses, errors."""
