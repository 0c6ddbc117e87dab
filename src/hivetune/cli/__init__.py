"""The command line: each command turns its arguments into one call. Only this package prints or chooses an exit
code."""
