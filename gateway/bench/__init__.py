"""Measurements over HTTP, as a client makes them: of any server that speaks the OpenAI protocol."""
