"""The doctor: it looks at the machine, judges it by known facts, proves its arithmetic, and says what to do."""
