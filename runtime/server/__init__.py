"""The HTTP server of the runtime: native, OpenAI and Anthropic routes over one TokenizerManager."""
