"""The doctor: looks at the machine, judges it by what is known, proves that it computes right, says what to do."""
