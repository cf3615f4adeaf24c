"""The inference engine: scheduler, paged KV cache, models. Never imports ray."""
