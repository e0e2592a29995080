"""What the commands of `gateway.cli` do; together with it and the backends the only code that knows engine."""
