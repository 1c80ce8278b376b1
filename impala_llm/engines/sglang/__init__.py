"""SGLang engine: generates on SGLang servers: their processes, clients and weights."""
