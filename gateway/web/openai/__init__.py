"""The OpenAI dialect: wire structs in, events out; one controller per resource."""
