"""Console commands: ferry, blade_llm_server, blade_llm_split, blade_llm_check."""
